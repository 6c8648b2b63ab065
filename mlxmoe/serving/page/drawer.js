// A column beside the messages: in its place on a wide window, over them on a narrow one.

import { byId } from "./dom.js";
import { usable } from "./store.js";

export class Drawer {
  static all = [];

  // `narrow`: media query. `set(open)`: shows or hides. Remembers what the user chose for a wide window.
  constructor({ node, opener, closer, narrow, name, set }) {
    Object.assign(this, { node, opener, name, set });
    this.media = matchMedia(narrow);
    this.media.addEventListener("change", () => this.begin());
    opener.addEventListener("click", () => this.toggle(!this.open));
    closer.addEventListener("click", () => this.toggle(false));
    byId("shade").addEventListener("click", () => this.over && this.toggle(false));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.over || document.querySelector("dialog[open]")) return;
      event.stopImmediatePropagation();
      this.toggle(false);
    });
    Drawer.all.push(this);
    this.begin();
  }

  get over() {
    return this.open && this.media.matches;
  }

  begin() {
    this.show(!this.media.matches && usable("localStorage")?.getItem(`mlxmoe.${this.name}`) !== "closed");
  }

  toggle(open) {
    this.show(open);
    if (!this.media.matches) {
      try {
        usable("localStorage")?.setItem(`mlxmoe.${this.name}`, open ? "open" : "closed");
      } catch {
        // Full: it will be open next time.
      }
    }
    if (this.over) this.node.querySelector("button").focus();
    else this.opener.focus();
  }

  show(open) {
    this.open = open;
    this.set(open);
    this.opener.setAttribute("aria-expanded", String(open));
    const over = Drawer.all.some((drawer) => drawer.over);
    byId("shade").hidden = !over;
    byId("talk").inert = over;
  }
}
