// The dialogs: settings, and the API key.

import { byId } from "./dom.js";
import { DEFAULTS } from "./store.js";

export class SettingsDialog {
  constructor(store, key) {
    this.store = store;
    this.key = key;
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
    cancels(this.dialog);
    this.dialog.addEventListener("close", () => this.dialog.returnValue === "save" && this.save());
    byId("forget-key").addEventListener("click", () => {
      key.forget();
      byId("forget-key").hidden = true;
    });
  }

  open() {
    const { system, temperature, maxTokens } = this.store.settings;
    byId("system").value = system;
    byId("temperature").value = temperature;
    byId("max-tokens").value = maxTokens ?? "";
    byId("forget-key").hidden = this.key.value === null;
    this.dialog.returnValue = "";
    this.dialog.showModal();
  }

  save() {
    const temperature = byId("temperature").valueAsNumber;
    const maxTokens = byId("max-tokens").valueAsNumber;
    this.store.settings = {
      system: byId("system").value,
      temperature: Number.isNaN(temperature) ? DEFAULTS.temperature : temperature,
      maxTokens: Number.isNaN(maxTokens) ? null : maxTokens,
    };
  }
}

// Its button closes the dialog without a word.
function cancels(dialog) {
  dialog.querySelector(".cancel").onclick = () => dialog.close("cancel");
}

// Ask for an API key: true once there is one. `wrong`: the one we had was refused.
export function askKey(key, wrong) {
  const dialog = byId("ask-key");
  byId("key-words").textContent = wrong ? "The server does not know this key." : "This server wants a key. Whoever runs it can give you one.";
  byId("key").value = "";
  cancels(dialog);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = byId("key").value.trim();
        byId("key").value = "";
        const usable = dialog.returnValue === "save" && given !== "";
        if (usable) key.set(given, byId("keep-key").checked);
        resolve(usable);
      },
      { once: true },
    );
  });
}
