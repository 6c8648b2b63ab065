// Conversations, drafts and settings, kept in this browser. What cannot be kept is held until the tab closes, and told.

const CHAT = "mlxmoe.chat.";
const DRAFT = "mlxmoe.draft.";
const SETTINGS = "mlxmoe.settings";
const CURRENT = "mlxmoe.current";

export const DEFAULTS = { system: "", temperature: 0.7, maxTokens: null };

export class Store {
  // `onTrouble(words)`: something could not be kept; null once all is kept again. `onChange(id)`: another tab did it.
  constructor(onTrouble, onChange) {
    this.onTrouble = onTrouble;
    this.conversations = new Map();
    this.unsaved = new Map(); // key -> what should be there
    this.storage = usable("localStorage");
    this.session = usable("sessionStorage");
    for (const key of this.keys(CHAT)) this.load(key);
    addEventListener("storage", ({ key, storageArea }) => {
      if (storageArea !== this.storage || !key?.startsWith(CHAT)) return;
      this.conversations.delete(key.slice(CHAT.length));
      this.load(key, "elsewhere");
      onChange(key.slice(CHAT.length));
    });
    if (!this.storage) onTrouble("This browser keeps nothing for this page: conversations end with the tab.");
  }

  keys(prefix) {
    return this.storage ? Object.keys(this.storage).filter((key) => key.startsWith(prefix)) : [];
  }

  // What is damaged is left where it is, and not shown. `going`: what a reply that is not finished is taken for.
  load(key, going = "left") {
    const found = parse(this.storage.getItem(key));
    if (!found || typeof found.title !== "string" || !Array.isArray(found.messages)) return;
    if (!found.messages.every(({ role, content }) => typeof role === "string" && typeof content === "string")) return;
    for (const message of found.messages) {
      if (message.state === "going") message.state = going;
    }
    this.conversations.set(key.slice(CHAT.length), { ...found, id: key.slice(CHAT.length) });
  }

  list() {
    return [...this.conversations.values()].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0));
  }

  create() {
    const random = crypto.getRandomValues(new Uint32Array(3));
    const id = Array.from(random, (part) => part.toString(36)).join("");
    return { id, title: "", named: false, created: Date.now(), updated: Date.now(), messages: [] };
  }

  save(conversation) {
    this.conversations.set(conversation.id, conversation);
    this.write(CHAT + conversation.id, JSON.stringify(conversation));
  }

  remove(id) {
    this.conversations.delete(id);
    this.forget(CHAT + id);
    this.forget(DRAFT + id);
    this.retry();
  }

  draft(id) {
    return this.unsaved.get(DRAFT + id) ?? this.storage?.getItem(DRAFT + id) ?? "";
  }

  keepDraft(id, text) {
    if (text) this.write(DRAFT + id, text);
    else this.forget(DRAFT + id);
  }

  get settings() {
    return { ...DEFAULTS, ...parse(this.unsaved.get(SETTINGS) ?? this.storage?.getItem(SETTINGS)) };
  }

  set settings(settings) {
    this.write(SETTINGS, JSON.stringify(settings));
  }

  // The conversation this tab showed last, or any tab did.
  get current() {
    return this.session?.getItem(CURRENT) ?? this.storage?.getItem(CURRENT) ?? null;
  }

  set current(id) {
    for (const storage of [this.session, this.storage]) {
      try {
        storage?.setItem(CURRENT, id);
      } catch {
        // Full: the next visit begins with the newest conversation.
      }
    }
  }

  write(key, value) {
    if (!this.storage) {
      this.unsaved.set(key, value);
      return;
    }
    try {
      this.storage.setItem(key, value);
      if (this.unsaved.delete(key)) this.retry();
    } catch {
      this.unsaved.set(key, value);
      this.onTrouble("This browser's storage is full: what is new is lost when the tab closes. Export it, or delete older conversations.");
    }
  }

  forget(key) {
    this.unsaved.delete(key);
    this.storage?.removeItem(key);
  }

  // Keep what did not fit before, now that there may be room.
  retry() {
    if (!this.storage) return;
    for (const [key, value] of this.unsaved) {
      try {
        this.storage.setItem(key, value);
        this.unsaved.delete(key);
      } catch {
        return;
      }
    }
    this.onTrouble(null);
  }
}

// The storage, or null where the browser refuses it.
export function usable(name) {
  try {
    const storage = globalThis[name];
    storage.getItem("");
    return storage;
  } catch {
    return null;
  }
}

function parse(text) {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return null;
  }
}
