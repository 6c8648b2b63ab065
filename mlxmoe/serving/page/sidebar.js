// The list of conversations: open, rename, delete.

import { byId, el, icon } from "./dom.js";

export class Sidebar {
  // `acts`: open(id), rename(id, title), remove(id).
  constructor(acts) {
    this.acts = acts;
    this.root = byId("chats");
  }

  // `running`: ids of those with a reply under way.
  show(conversations, current, running) {
    if (this.root.querySelector("input")) return; // a title is being written
    const focused = this.root.contains(document.activeElement) ? document.activeElement : null;
    const row = focused?.closest("li")?.dataset.id;
    const kind = focused?.dataset.kind;
    this.root.replaceChildren(...conversations.map((each) => this.row(each, each.id === current, running.has(each.id))));
    if (row) this.root.querySelector(`li[data-id="${CSS.escape(row)}"] [data-kind="${kind}"]`)?.focus();
  }

  row({ id, title }, current, running) {
    const item = el("li", { class: `${current ? "current" : ""} ${running ? "running" : ""}`.trim() || null, "data-id": id });
    const name = title || "New conversation";
    const open = el("button", { type: "button", class: "open", "data-kind": "open", "aria-current": current ? "true" : null, title: name, onclick: () => this.acts.open(id) }, name);
    if (running) open.append(el("span", { class: "sr" }, ", a reply is being written"));
    const rename = el("button", { type: "button", class: "icon-button", "data-kind": "rename", "aria-label": `Rename ${name}`, onclick: () => this.rename(item, id, name) }, icon("rename"));
    const remove = el("button", { type: "button", class: "icon-button", "data-kind": "remove", "aria-label": `Delete ${name}`, onclick: () => this.acts.remove(id) }, icon("delete"));
    item.append(open, rename, remove);
    return item;
  }

  rename(item, id, name) {
    const input = el("input", { "aria-label": "Title", maxlength: "120" });
    input.value = name;
    let over = false;
    const done = (keep) => {
      if (over) return;
      over = true;
      input.remove();
      this.acts.rename(id, keep && input.value.trim() ? input.value.trim() : name);
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      event.preventDefault();
      done(event.key === "Enter");
      this.root.querySelector(`li[data-id="${CSS.escape(id)}"] [data-kind="rename"]`)?.focus();
    });
    input.addEventListener("blur", () => done(true));
    item.replaceChildren(input);
    input.select();
  }
}
