// Where the time of a turn went: the waterfall, the lead and the one number that counts.

import { showWaterfall } from "./charts.js";
import { $, make } from "./dom.js";

/** @param {import("./turn.js").Turn | null} turn @param {number | null} rtt_ms */
export function showTiming(turn, rtt_ms) {
  const stages = turn?.waterfall() ?? [];
  showWaterfall($("waterfall"), stages);
  $("waterfall-note").textContent = rtt_ms === null ? "" : `round trip ${rtt_ms.toFixed(1)} ms`;
  const underruns = turn?.underruns.length ?? 0;
  const count = `${underruns} underrun${underruns === 1 ? "" : "s"}`;
  $("lead-note").textContent = turn ? `${count} · starts with ${turn.prebuffer_ms} ms` : "";
  $("lead").setAttribute("aria-label", `Sound held ahead of the listener over time, ${underruns} underruns`);
  showHeadline(turn);
}

function showHeadline(turn) {
  const headline = $("headline");
  if (!turn?.frames.length) {
    headline.textContent = turn?.state === "waiting" ? "Waiting for the first sound" : "";
    return;
  }
  const isPlaying = turn.sound_ms !== null;
  const after_ms = turn.sound_after_ms ?? turn.ttfa_ms;
  const what = isPlaying ? "from keystroke to sound" : "to the first audio, not playing yet";
  const parts = [`server ${turn.server_ms.toFixed(0)}`, `network ${turn.network_ms.toFixed(1)}`];
  if (isPlaying) parts.push(`page and player ${Math.max(0, after_ms - turn.ttfa_ms).toFixed(0)}`);
  headline.replaceChildren(
    make("b", { textContent: `${Math.round(after_ms)} ms` }),
    ` ${what} `,
    make("span", { textContent: [...parts, ...outcome(turn)].join(" · ") }),
  );
}

function outcome({ state, done, isPaused }) {
  if (isPaused && state === "speaking") return ["paused"];
  if (state !== "interrupted") return [];
  return done?.heard ? [`interrupted, ${done.heard.num_words} words were heard`] : ["interrupted"];
}
