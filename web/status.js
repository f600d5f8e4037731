// What the page says about itself: errors, the connection, the sound.

import { $, make } from "./dom.js";

/** @param {string | null} message @param {(() => void) | null} again */
export function fail(message, again = null) {
  const box = $("error");
  box.hidden = !message;
  box.replaceChildren(message ?? "");
  if (!message || !again) return;
  const button = make("button", { type: "button", className: "link", textContent: "Try again" });
  button.onclick = again;
  box.append(button);
}

/**
 * A turn's error in the server's own words, once.
 * @param {any} turn @param {(() => void) | null} again
 */
export function showError(turn, again) {
  const { error } = turn;
  if (!error || turn.isErrorShown) return;
  turn.isErrorShown = true;
  const words = error.message.replace(/\.$/, "") + (error.code ? ` (${error.code}).` : ".");
  const wait_s = (error.retry_after_ms ?? 0) / 1000;
  const advice = wait_s ? ` The server suggests waiting ${wait_s.toFixed(1)} s.` : "";
  fail(words + advice, error.retryable ? again : null);
}

/** A word in passing. @param {string} text */
export function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("shown");
  setTimeout(() => $("toast").classList.remove("shown"), 2000);
}

const LOOKS = { ready: "good", waiting: "bad", refused: "bad" };

/** @param {import("./connection.js").Connection} connection */
export function showConnection({ state, session, rtt_ms }) {
  const { name, detail, retry_ms } = state;
  const wait_s = Math.max(0, Math.ceil((retry_ms - performance.now()) / 1000));
  const words = {
    connecting: "Connecting",
    ready: `Connected · ${session?.model}`,
    waiting: `${detail} Trying again`,
  };
  // What changes all the time is not for screen readers, and stands in an element of its own.
  const details = {
    ready: rtt_ms === null ? "" : `· ${rtt_ms.toFixed(1)} ms away`,
    waiting: wait_s ? `in ${wait_s} s` : "now",
  };
  const text = words[name] ?? detail;
  if ($("connection-text").textContent !== text) $("connection-text").textContent = text;
  $("connection-detail").textContent = details[name] ?? "";
  $("connection").className = `chip ${LOOKS[name] ?? ""}`;
  $("connection").dataset.state = name;
  $("retry").hidden = name !== "waiting";
  $("token-form").hidden = name !== "refused";
}

const PORT = location.port || 80;
const NO_SOUND = {
  insecure:
    "No sound on this page: it came over plain http from another machine, and browsers give their audio " +
    "player (AudioWorklet) only to https and localhost. Timings still work.\n" +
    `To hear it: open a tunnel, ssh -L ${PORT}:localhost:${PORT} ${location.hostname}, and go to ` +
    `http://localhost:${PORT}/; or put https in front of the server.`,
  "no-worklet":
    "This browser has no AudioWorklet, so nothing can be played. A current Chrome, Firefox or Safari has one.",
};
const LOCKED = "Sound is locked by the browser: click anywhere or press a key";

/** @param {import("./audio.js").Speaker} speaker @param {number} streamRate */
export function showSound(speaker, streamRate) {
  const { problem, rate, isOpen, isRunning } = speaker;
  const state = problem ? "none" : isRunning ? "on" : "locked";
  const texts = { none: "No sound", on: `Sound on · ${rate / 1000} kHz`, locked: isOpen ? LOCKED : "Sound" };
  $("notice").hidden = !problem;
  $("notice").textContent = NO_SOUND[problem] ?? problem;
  $("sound").className = `chip ${{ none: "bad", on: "good", locked: "" }[state]}`;
  $("sound").dataset.state = state;
  $("sound-text").textContent = texts[state];
  $("sound-detail").textContent = problem ? "" : resampling(speaker, streamRate);
}

/** Says which resampling happens between the server and the ear. */
function resampling({ rate, deviceRate }, streamRate) {
  const here =
    streamRate === rate
      ? `Samples play as they come, at ${rate / 1000} kHz.`
      : `This page resamples ${streamRate / 1000} to ${rate / 1000} kHz (windowed sinc).`;
  if (!deviceRate || deviceRate === rate) return here;
  return `${here} The browser resamples to the device's ${deviceRate / 1000} kHz at the output.`;
}
