// Settings of the page: a form, kept in the address (to share) and in local storage (to come back to).
//
// Only what differs from the default is kept. An empty field means: the server's own choice.

const STORAGE_KEY = "realtime.playground";

export const DEFAULTS = {
  mode: "whole",
  tokens_per_s: "30",
  jitter: "30",
  flush_ms: "700",
  streams: "8",
  lines: "samples",
  model: "",
  voice: "",
  language: "",
  encoding: "pcm_s16le",
  sample_rate: "48000",
  trigger: "",
  seed: "",
  temperature: "",
  top_k: "",
  top_p: "",
  repetition_penalty: "",
  max_lead_ms: "",
  start_buffer_ms: "",
  context_rate: "48000",
};

const SAMPLING = ["temperature", "top_k", "top_p", "repetition_penalty", "seed"];

export class Settings {
  /** @param {HTMLFormElement} form whose controls are named as in DEFAULTS */
  constructor(form) {
    this.form = form;
    this.values = {
      ...DEFAULTS,
      ...known(stored()),
      ...known(Object.fromEntries(new URLSearchParams(location.search))),
    };
    this.onChange = () => {};
    document.addEventListener("input", (event) => event.target.form === form && this.#changed(event));
    this.show();
  }

  #changed(event) {
    const { name } = event.target;
    if (!(name in DEFAULTS)) return;
    this.values[name] = event.target.value;
    this.#keep();
    this.onChange(name);
  }

  set(name, value) {
    this.values[name] = value;
    this.#keep();
    this.show();
    this.onChange(name);
  }

  reset() {
    this.values = { ...DEFAULTS, mode: this.values.mode };
    this.#keep();
    this.show();
    this.onChange("");
  }

  /** Puts the values into the form; one that a list does not know stays choosable. */
  show() {
    for (const [name, value] of Object.entries(this.values)) {
      const control = this.form.elements.namedItem(name);
      if (control instanceof HTMLSelectElement && ![...control.options].some((o) => o.value === value)) {
        control.add(new Option(value, value));
      }
      if (control) control.value = value;
    }
  }

  /** @param {string} name @param {[value: string, label: string][]} options */
  choices(name, options) {
    const select = this.form.elements.namedItem(name);
    select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
    this.show();
  }

  /** What the protocol's `open` wants. */
  fields() {
    const v = this.values;
    const fields = {
      format: { encoding: v.encoding, sample_rate: number(v.sample_rate), channels: 1 },
      words: "word",
      metrics: "full",
      client: { name: "playground" },
    };
    for (const name of ["model", "voice", "language"]) if (v[name]) fields[name] = v[name];
    for (const name of SAMPLING) if (v[name] !== "") fields[name] = number(v[name]);
    if (v.trigger) fields.trigger = { mode: v.trigger };
    if (v.max_lead_ms) fields.pacing = { max_lead_ms: number(v.max_lead_ms) };
    return fields;
  }

  /** Of the simulated language model. */
  pace() {
    const { tokens_per_s, jitter } = this.values;
    return { tokens_per_s: Number(tokens_per_s), jitter: Number(jitter) / 100 };
  }

  #keep() {
    const changed = Object.entries(this.values).filter(([name, value]) => value !== DEFAULTS[name]);
    const query = new URLSearchParams(changed).toString();
    history.replaceState(null, "", query ? `?${query}` : location.pathname);
    try {
      localStorage.setItem(STORAGE_KEY, JSON.stringify(Object.fromEntries(changed)));
    } catch {
      // Storage may be forbidden; the address still has it.
    }
  }
}

/** A number where it is one; else the words as they are, for the server to refuse in its own. */
function number(text) {
  const value = Number(text);
  return text.trim() !== "" && Number.isFinite(value) ? value : text;
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(STORAGE_KEY)) ?? {};
  } catch {
    return {};
  }
}

function known(values) {
  return Object.fromEntries(
    Object.entries(values).filter(([name, value]) => name in DEFAULTS && typeof value === "string"),
  );
}
