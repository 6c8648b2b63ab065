// Markdown as DOM nodes, and a view that grows with a text that is being written. HTML in it stays text.

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

const DEEP = 8; // lists and quotes within each other; what is deeper is a paragraph
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const CHUNK = 60; // lines of code in one element: a long block grows without laying out all of it

// All of a text at once.
export function markdown(text) {
  return blocks(text.split("\n")).map((block) => render(block));
}

// A text that grows: what is complete stays as it is, only the last block is made again.
export class GrowingMarkdown {
  // `onBlock(node)`: told of each block once it is complete.
  constructor(root, onBlock = () => {}) {
    this.root = root;
    this.onBlock = onBlock;
    this.rest = ""; // text of the block that is not complete yet
    this.tail = null;
  }

  // Take more text and show it.
  append(text) {
    this.rest += text;
    if (this.tail?.grow?.(text)) return;
    const lines = this.rest.split("\n");
    const found = blocks(lines);
    const last = found.pop();
    if (!last) return;
    // A line that is still being written may yet turn out to belong to the block before it.
    if (found.length && last.from >= lines.length - 1) this.show([...found, last], found.pop(), lines, found);
    else this.show([...found, last], last, lines, found);
  }

  show(all, open, lines, complete) {
    const before = this.tail?.nodes ?? [];
    for (const node of before) node.remove();
    for (const block of complete) {
      const node = render(block);
      this.root.append(node);
      this.onBlock(node);
    }
    const nodes = all.slice(complete.length).map((block) => render(block));
    this.root.append(...nodes);
    this.rest = lines.slice(open.from).join("\n");
    const grows = nodes.length === 1 && open.kind === "code" && !open.closed && open.from < lines.length - 1;
    this.tail = { nodes, grow: grows ? growCode(nodes[0]) : null };
  }

  // There is no more.
  end() {
    for (const node of this.tail?.nodes ?? []) this.onBlock(node);
    this.tail = null;
  }
}

// Takes further text of an open code block: false where it may hold the block's end.
function growCode(figure) {
  const code = figure.querySelector("code");
  let line = code.textContent.split("\n").at(-1);
  return (text) => {
    line += text;
    if (/^ {0,3}[`~]/m.test(line)) return false;
    line = line.slice(line.lastIndexOf("\n") + 1);
    addCode(code, text);
    return true;
  };
}

function addCode(code, text) {
  let last = code.lastElementChild;
  const lines = text.split(/(?<=\n)/);
  for (const line of lines) {
    if (!last || (last.lines >= CHUNK && last.ended)) {
      last = el("span", { class: "chunk" }, "");
      last.lines = 0;
      code.append(last);
    }
    if (!last.firstChild) last.append("");
    last.firstChild.appendData(line);
    last.ended = line.endsWith("\n");
    if (last.ended) last.lines++;
  }
}

// The blocks of some lines, each with the line it begins at.
function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = { from: at, ...blockAt(lines, at, depth) };
    found.push(block);
    at = block.to;
  }
  return found;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2], to: at + 1 };
  if (RULE.test(line)) return { kind: "rule", to: at + 1 };
  if (depth < DEEP && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEP && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  let to = at + 1;
  while (to < lines.length && lines[to].trim() && !beginsBlock(lines, to, depth)) to++;
  return { kind: "paragraph", text: lines.slice(at, to).map((part) => part.trim()).join("\n"), to };
}

function beginsBlock(lines, at, depth) {
  const line = lines[at];
  const block = FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at);
  return block || (depth < DEEP && (QUOTE.test(line) || (ITEM.test(line) && !/^ *\d+[.)]?$/.test(line))));
}

function fenced(lines, at, fence) {
  const [, mark, language] = fence;
  const end = (line) => /^ {0,3}(`+|~+)[ \t]*$/.test(line) && line.trim()[0] === mark[0] && line.trim().length >= mark.length;
  let to = at + 1;
  while (to < lines.length && !end(lines[to])) to++;
  const closed = to < lines.length;
  return { kind: "code", language: language.trim().split(/\s/)[0], text: lines.slice(at + 1, to).join("\n"), closed, to: closed ? to + 1 : to };
}

function quote(lines, at, depth) {
  let to = at;
  while (to < lines.length && QUOTE.test(lines[to])) to++;
  return { kind: "quote", blocks: blocks(lines.slice(at, to).map((line) => line.replace(QUOTE, "")), depth + 1), to };
}

function list(lines, at, depth) {
  const [, indent, sign] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(sign);
  const items = [];
  let to = at;
  let inside = 0; // columns that what belongs to the item is indented by
  for (; to < lines.length; to++) {
    const line = lines[to];
    const item = ITEM.exec(line);
    const own = /^ */.exec(line)[0].length;
    if (item && own <= indent.length + 1 && own < Math.max(inside, indent.length + 2) && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered) break;
      inside = own + item[2].length + 1;
      items.push([line.slice(item[0].length)]);
    } else if (!line.trim() || own >= Math.min(inside, indent.length + 2)) {
      items.at(-1).push(line.slice(Math.min(own, inside)));
    } else if (!lines[to - 1].trim() || beginsBlock(lines, to, depth)) break;
    else items.at(-1).push(line);
  }
  while (!lines[to - 1].trim()) to--;
  return { kind: "list", start: ordered ? parseInt(sign, 10) : null, items: items.map((item) => blocks(item, depth + 1)), to };
}

function isTable(lines, at) {
  const divider = lines[at + 1] ?? "";
  return lines[at].includes("|") && divider.includes("-") && divider.includes("|") && DIVIDER.test(divider);
}

function table(lines, at) {
  let to = at + 2;
  while (to < lines.length && lines[to].includes("|")) to++;
  return { kind: "table", head: cells(lines[at]), rows: lines.slice(at + 2, to).map(cells), to };
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function render(block) {
  switch (block.kind) {
    case "code":
      return codeBlock(block.language, block.text);
    case "heading":
      return el(`h${Math.min(block.level + 2, 6)}`, { dir: "auto" }, ...inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...block.blocks.map(render));
    case "list":
      return renderList(block);
    case "table":
      return renderTable(block);
    default:
      return el("p", { dir: "auto" }, ...inline(block.text));
  }
}

function renderList({ start, items }) {
  const rendered = items.map((item) => {
    const alone = item.length && item[0].kind === "paragraph" && item.slice(1).every(({ kind }) => kind === "list");
    const nodes = alone ? [...inline(item[0].text), ...item.slice(1).map(render)] : item.map(render);
    return el("li", { dir: "auto" }, ...nodes);
  });
  return start === null ? el("ul", {}, ...rendered) : el("ol", { start: start === 1 ? null : start }, ...rendered);
}

function renderTable({ head, rows }) {
  const row = (tag, texts) => el("tr", {}, ...texts.map((text) => el(tag, { dir: "auto" }, ...inline(text))));
  const body = el("tbody", {}, ...rows.map((texts) => row("td", texts)));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, el("thead", {}, row("th", head)), body));
}

function codeBlock(language, text) {
  const code = el("code");
  addCode(code, text);
  const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy this code", () => code.textContent));
  const pre = el("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code);
  return el("figure", { class: "code" }, head, pre);
}
