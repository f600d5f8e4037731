// The form: what can be chosen, from what the server announces, and what the chosen mode needs.

import { $ } from "./dom.js";
import { PLAYABLE } from "./wire.js";

const RATES = [8_000, 16_000, 22_050, 24_000, 44_100, 48_000];
const LEADS_MS = [200, 500, 1000, 2000, 5000, 10_000];

/** @param {import("./settings.js").Settings} settings */
export function showSettings({ values }) {
  for (const element of document.querySelectorAll("[data-mode]")) {
    element.hidden = element.dataset.mode !== values.mode;
  }
  $("centre").hidden = values.mode !== "many";
  $("text").hidden = values.mode === "many" && values.lines === "samples";
  $("tokens-out").textContent = values.tokens_per_s;
  $("jitter-out").textContent = `${values.jitter} %`;
  $("flush-out").textContent = `${(Number(values.flush_ms) / 1000).toFixed(1)} s`;
  $("streams-out").textContent = values.streams;
  $("settings-note").textContent =
    `${values.voice || "default voice"} · ${Number(values.sample_rate) / 1000} kHz`;
  const isLive = values.mode === "live";
  $("text").placeholder = isLive ? "Type: every keystroke is sent" : "What should it say?";
  $("speak").firstChild.textContent = isLive ? "End the turn " : "Speak ";
  $("hint").textContent = isLive ? "Shift+Enter for a new line" : "";
}

/** Before the server is heard, and where it does not say. @param {import("./settings.js").Settings} settings */
export function offerFormats(settings, encodings = PLAYABLE, rates = RATES) {
  settings.choices(
    "encoding",
    encodings.map((name) => [name, name]),
  );
  settings.choices(
    "sample_rate",
    rates.map((rate) => [String(rate), `${rate / 1000} kHz`]),
  );
}

/** @param {import("./settings.js").Settings} settings @param {any[]} models as /v1/models lists them */
export function offerChoices(settings, models) {
  const all = (name) => [...new Set(models.flatMap((model) => model[name] ?? []))];
  const named = (values) => [["", "the server's choice"], ...values.map((value) => [value, value])];
  settings.choices("model", named(models.map(({ id }) => id)));
  settings.choices("voice", named(all("voices")));
  settings.choices("language", named(all("languages")));
  const encodings = all("encodings").filter((name) => PLAYABLE.includes(name));
  const rates = all("sample_rates");
  offerFormats(settings, encodings.length ? encodings : PLAYABLE, rates.length ? rates : RATES);
}

/** @param {import("./settings.js").Settings} settings @param {any} ready the server's `session.ready` */
export function offerLeads(settings, { limits }) {
  const leads = LEADS_MS.filter((lead_ms) => lead_ms < limits.max_lead_ms);
  const options = leads.map((lead_ms) => [String(lead_ms), `${lead_ms / 1000} s`]);
  settings.choices("max_lead_ms", [["", `${limits.max_lead_ms / 1000} s`], ...options]);
}
