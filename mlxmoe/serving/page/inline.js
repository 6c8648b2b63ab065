// Markdown within a paragraph, as DOM nodes: code, bold, italics, struck out, links. HTML in it stays text.

import { el } from "./dom.js";

const FAR = 1000; // characters within which what was opened has to be closed: keeps hostile text linear
const DEEP = 12;
const SPECIAL = /[\n\\`![<*_~]|https?:/g;
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

export function inline(text, depth = 0) {
  const nodes = [];
  const searched = {}; // mark -> up to where none closes it: nothing is searched twice
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    SPECIAL.lastIndex = at;
    const next = depth < DEEP ? (SPECIAL.exec(text)?.index ?? text.length) : text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const found = special(text, at, depth, searched);
    if (!found) {
      plain += text[at++];
      continue;
    }
    if (typeof found.node === "string") plain += found.node;
    else {
      flush();
      nodes.push(found.node);
    }
    at = found.end;
  }
  flush();
  return nodes;
}

// What begins at `at`, if it is more than a character: its node or text, and where it ends.
function special(text, at, depth, searched) {
  switch (text[at]) {
    case "\n":
      return { node: el("br"), end: at + 1 };
    case "\\":
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
    case "`":
      return codeSpan(text, at);
    case "!":
      return text[at + 1] === "[" ? bracketed(text, at + 1, depth) : null;
    case "[":
      return bracketed(text, at, depth);
    case "<":
    case "h":
      return address(text, at);
    case "*":
    case "_":
    case "~":
      return emphasis(text, at, depth, searched);
    default:
      return null;
  }
}

function codeSpan(text, at) {
  const ticks = /^`+/.exec(text.slice(at, at + FAR))[0];
  let end = at + ticks.length;
  for (;;) {
    end = text.indexOf(ticks, end);
    if (end < 0 || end - at > FAR) return { node: ticks, end: at + ticks.length };
    if (text[end + ticks.length] !== "`" && text[end - 1] !== "`") break;
    while (text[end] === "`") end++;
  }
  const code = text.slice(at + ticks.length, end);
  const shown = /^ .*[^ ].* $/s.test(code) ? code.slice(1, -1) : code;
  return { node: el("code", {}, shown.replaceAll("\n", " ")), end: end + ticks.length };
}

function bracketed(text, at, depth) {
  let open = 0;
  let close = at;
  for (const last = Math.min(text.length, at + FAR); close < last; close++) {
    if (text[close] === "\\") close++;
    else if (text[close] === "[") open++;
    else if (text[close] === "]" && --open === 0) break;
  }
  if (text[close] !== "]" || open !== 0 || text[close + 1] !== "(") return null;
  const target = /^\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/.exec(
    text.slice(close + 1, close + FAR),
  );
  if (!target) return null;
  const label = text.slice(at + 1, close) || target[1];
  const link = linkTo(target[1], depth < DEEP - 1 ? inline(label, DEEP - 1) : [label]);
  return link ? { node: link, end: close + 1 + target[0].length } : null;
}

function address(text, at) {
  if (text[at] === "h" && /[\p{L}\p{N}]/u.test(text[at - 1] ?? " ")) return null;
  const found = /^(<?)(https?:\/\/[^\s<>"'`]+)/.exec(text.slice(at, at + FAR));
  if (!found) return null;
  const bracket = found[1] && text[at + found[0].length] === ">";
  if (found[1] && !bracket) return null;
  let href = found[2];
  if (!bracket) {
    href = href.replace(/[.,;:!?*_~\]]+$/, "");
    if (href.endsWith(")") && !href.includes("(")) href = href.slice(0, -1);
  }
  const link = linkTo(href, [href]);
  return link ? { node: link, end: at + href.length + (bracket ? 2 : 0) } : null;
}

// Only http and https: anything else (javascript:, data:, a path of this server) stays text.
function linkTo(href, label) {
  if (!/^https?:\/\//i.test(href) || !URL.canParse(href)) return null;
  return el("a", { href, rel: "noopener noreferrer", target: "_blank", title: href }, ...label);
}

function emphasis(text, at, depth, searched) {
  const two = text.slice(at, at + 2);
  for (const mark of two in MARKS ? [two, two[0]] : [two[0]]) {
    const end = mark in MARKS ? closing(text, at, mark, searched) : -1;
    if (end < 0) continue;
    const node = el(MARKS[mark], {}, ...inline(text.slice(at + mark.length, end), depth + 1));
    return { node, end: end + mark.length };
  }
  const run = /^([*_~])\1*/.exec(text.slice(at, at + FAR))[0];
  return { node: run, end: at + run.length };
}

// Where the mark that opens at `at` is closed, or -1. Marks hug their words; `_` is none within a word.
function closing(text, at, mark, searched) {
  const begin = at + mark.length;
  const word = (character) => /[\p{L}\p{N}]/u.test(character ?? "");
  if (!text[begin] || /\s/.test(text[begin]) || (mark[0] === "_" && word(text[at - 1]))) return -1;
  let end = text.indexOf(mark, Math.max(begin + 1, searched[mark] ?? 0));
  for (; end > 0 && end - at < FAR; end = text.indexOf(mark, end + 1)) {
    if (/[\s\\]/.test(text[end - 1])) continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) {
      if (text[end + 1] === mark) end++;
      continue;
    }
    if (mark === "**" && text[end + 2] === "*") end++; // **bold and *italic***
    if (mark[0] === "_" && word(text[end + mark.length])) continue;
    return end;
  }
  searched[mark] = end < 0 ? text.length : end;
  return -1;
}
