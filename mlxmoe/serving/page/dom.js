// Making and finding elements. Text becomes text nodes, never markup.

export const byId = (id) => document.getElementById(id);

// el("p", { class: "note", onclick: f }, "text", child): `on...` are listeners, others attributes; null is left out.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

// A copy button for what `text()` gives. Without https there is no clipboard API: then the old command.
export function copyButton(label, text) {
  const words = el("span", { class: "label" }, "Copy");
  const button = el("button", { type: "button", class: "action", "aria-label": label }, icon("copy"), words);
  button.addEventListener("click", async () => {
    const done = await copy(text());
    words.textContent = done ? "Copied" : "Not allowed";
    button.firstChild.replaceWith(icon(done ? "done" : "copy"));
    announce(words.textContent);
    setTimeout(() => {
      words.textContent = "Copy";
      button.firstChild.replaceWith(icon("copy"));
    }, 1600);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "sr", "aria-hidden": "true", tabindex: "-1" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return done;
  }
}

// Said by a screen reader when it has nothing better to say.
export function announce(text) {
  const announcer = byId("announcer");
  announcer.append(el("p", {}, text));
  while (announcer.childElementCount > 4) announcer.firstElementChild.remove();
}

// A line at the foot of the window with one thing to do about it, which gets the focus.
let hide = 0;
export function toast(words, action, run) {
  const node = byId("toast");
  const close = () => {
    clearTimeout(hide);
    node.hidden = true;
    node.replaceChildren();
  };
  const button = el("button", { type: "button", class: "quiet" }, action);
  button.addEventListener("click", () => {
    close();
    run();
    byId("prompt").focus();
  });
  const dismiss = el("button", { type: "button", class: "icon-button", "aria-label": "Dismiss" }, icon("close"));
  dismiss.addEventListener("click", () => {
    close();
    byId("prompt").focus();
  });
  node.replaceChildren(el("span", {}, words), button, dismiss);
  node.hidden = false;
  clearTimeout(hide);
  const later = () => {
    hide = setTimeout(() => (node.matches(":hover, :focus-within") ? later() : close()), 12000);
  };
  later();
  return button;
}
