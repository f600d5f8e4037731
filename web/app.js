// The page: puts the parts together. What is computed lives in the modules, here is only what is shown.

import { Speaker } from "./audio.js";
import { Centre } from "./centre.js";
import { Scope, drawLead } from "./charts.js";
import { Connection } from "./connection.js";
import { offerChoices, offerFormats, offerLeads, showSettings } from "./controls.js";
import { $, make } from "./dom.js";
import { History } from "./history.js";
import { Prebuffer } from "./prebuffer.js";
import { Settings } from "./settings.js";
import { probeCommand, pythonSnippet, wavOf } from "./share.js";
import { LiveTyping, TokenStream } from "./sources.js";
import { Speech } from "./speech.js";
import { fail, showConnection, showError, showSound, toast } from "./status.js";
import { showTiming } from "./timing.js";
import { Transcript, placeAt } from "./words.js";

const TOKEN_KEY = "realtime.token";

const settings = new Settings($("form"));
const speaker = new Speaker();
const prebuffer = new Prebuffer();
const connection = new Connection(new URL(".", location.href));
const speech = new Speech(connection, speaker, prebuffer);
const centre = new Centre($("streams"), speech);
const transcript = new Transcript($("transcript"));
const scope = new Scope($("wave"), $("spectrum"));
const history_ = new History($("history"), takeAlong);

let shown = null; // the turn in the middle of the page
let tokens = null; // the simulated model that is writing
let models = [];
const asked = new WeakMap(); // how to do a failed turn again

// ---- speaking

function speak(input_ms) {
  const text = $("text").value;
  const { mode } = settings.values;
  if (mode === "live") return endLive();
  const needsText = mode !== "many" || settings.values.lines === "text";
  if (needsText && !text.trim()) return fail("There is nothing to say yet: type something first.");
  if (!connection.isReady)
    return fail(`Not connected. ${connection.state.detail}`, () => speak(performance.now()));
  const replaces = begin();
  if (mode === "many") return speakMany(text, input_ms, replaces);
  const pace = mode === "llm" ? settings.pace() : null;
  const turn = show(speech.start({ mode, fields: settings.fields(), tokens: pace, input_ms, replaces }));
  asked.set(turn, () => speak(performance.now()));
  if (!pace) return write(turn, text, { end: true });
  tokens = new TokenStream(
    text,
    pace,
    (token, isLast) => {
      if (turn.isLive) write(turn, token, { end: isLast });
      else tokens.stop();
    },
    () => turn.isHeld === true,
  );
}

/** Whatever speaks gives way to what comes. @returns {any[]} the turns to replace */
function begin() {
  fail(null);
  tokens?.stop();
  return speech.turns.filter((turn) => turn.isLive || turn.isPlaying);
}

function speakMany(text, input_ms, replaces) {
  const voices = models[0]?.voices ?? [];
  centre.start({
    num: Number(settings.values.streams),
    text: settings.values.lines === "text" ? text : null,
    voices,
    fields: settings.fields(),
    input_ms,
    replaces,
  });
  for (const { turn } of centre.cards) asked.set(turn, () => speak(performance.now()));
  show(centre.heardTurn);
}

function write(turn, text, options) {
  speech.write(turn, text, options);
  if (turn === shown) transcript.append(text);
}

/** Makes a turn the one in the middle of the page. */
function show(turn) {
  if (turn === shown) return turn;
  shown = turn;
  transcript.clear();
  if (turn) transcript.append(turn.text);
  return turn;
}

function interrupt() {
  tokens?.stop();
  for (const turn of speech.turns) if (turn.isLive || turn.isPlaying) speech.interrupt(turn);
  if (settings.values.mode === "live") clearLive();
}

function togglePause() {
  const live = speech.turns.filter((turn) => turn.isLive);
  const arePaused = live.some((turn) => turn.isPaused);
  for (const turn of live) arePaused ? speech.resume(turn) : speech.pause(turn);
}

// ---- live typing

let typed = null; // the turn that is being typed
const live = new LiveTyping($("text"), {
  isActive: () => settings.values.mode === "live",
  flush_ms: () => Number(settings.values.flush_ms),
  write: typeOn,
  flush: () => typed && speech.flush(typed),
  refused: (why) => fail(why),
});

function typeOn(delta, at_ms) {
  if (!connection.isReady) return fail(`Not connected. ${connection.state.detail}`);
  if (!typed?.isLive || typed.isEnded || typed.done) {
    typed = show(
      speech.start({ mode: "live", fields: settings.fields(), input_ms: at_ms, replaces: begin() }),
    );
  }
  fail(null);
  write(typed, delta, {});
}

function endLive() {
  if (typed) speech.end(typed);
  clearLive();
}

function clearLive() {
  typed = null;
  $("text").value = "";
  live.reset();
}

// ---- what the page shows

const FRAME_MS = 30; // a drawing in a while: the processor may be the one that speaks

let isDrawing = false;
let isStale = true;
let played = false; // at the last drawing
let drawn_ms = 0;

function draw(now_ms) {
  if (now_ms - drawn_ms < FRAME_MS) return requestAnimationFrame(draw);
  drawn_ms = now_ms;
  isDrawing = false;
  const plays = speech.turns.some((turn) => turn.isPlaying);
  if (plays && speaker.isRunning) scope.take(speaker.analyser, speaker.context.currentTime);
  scope.draw();
  if (shown?.isPlaying && shown.sound_ms !== null) {
    const place = placeAt(shown, shown.lane.heard);
    transcript.mark(place);
    $("now-note").textContent = place.isEstimate
      ? "place in the text is an estimate"
      : "word times from the server";
  } else if (shown?.state === "spoken") {
    transcript.mark({ c0: shown.numChars, c1: shown.numChars });
  }
  drawLead($("lead"), shown);
  centre.show();
  if (isStale || plays !== played) showTurns();
  isStale = false;
  played = plays;
  if (plays) redraw(false);
}

function redraw(stale = true) {
  isStale ||= stale;
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(draw);
}

function showTurns() {
  const { turns } = speech;
  const isLive = turns.some((turn) => turn.isLive || turn.isPlaying);
  $("interrupt").disabled = !isLive;
  $("pause").disabled = !speech.live.length;
  $("pause").textContent = speech.live.some((turn) => turn.isPaused) ? "Resume" : "Pause";
  history_.show(turns);
  $("history-note").textContent = turns.length ? "" : "nothing spoken yet";
  const num = speech.live.length;
  $("centre-note").textContent = num ? `${num} speaking` : "";
  showTiming(shown, connection.rtt_ms);
}

// ---- taking turns along

async function takeAlong(action, turn) {
  const server = { url: connection.streamUrl.href, hasToken: Boolean(connection.token) };
  if (action === "wav") return download(wavOf(turn), `turn-${turn.ctx.slice(1)}.wav`);
  const text = action === "probe" ? probeCommand(turn, server) : pythonSnippet(turn, server);
  try {
    await navigator.clipboard.writeText(text);
    toast(action === "probe" ? "Copied: paste it into a terminal" : "Copied: save it as turn.py");
  } catch {
    window.prompt("Copying is not allowed here; take it from this box:", text);
  }
}

function download(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ---- events

for (const kind of ["pointerdown", "pointerup", "keydown"]) {
  document.addEventListener(kind, () => speaker.unlock(), { capture: true }); // inside the gesture, each time
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  speak(event.timeStamp);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") interrupt();
  const isFree = event.target === $("text") || event.target === document.body; // else Enter belongs to the control
  if (event.key === "Enter" && isFree && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!event.repeat) speak(event.timeStamp);
  }
});
$("interrupt").onclick = interrupt;
$("pause").onclick = togglePause;
$("retry").onclick = () => connection.retryNow();
$("reset").onclick = () => settings.reset();
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken($("token").value);
  connection.connect();
});
window.addEventListener("resize", () => redraw(false));

centre.onHear = () => show(centre.heardTurn);
speech.onTurn = (turn) => {
  showError(turn, asked.get(turn) ?? null);
  redraw();
  if (turn.state === "spoken") speaker.findDeviceRate();
};
speaker.onState = () => {
  showSound(speaker, streamRate());
  redraw();
};
settings.onChange = (name) => {
  const { start_buffer_ms } = settings.values;
  prebuffer.fixed_ms = start_buffer_ms ? Number(start_buffer_ms) : null;
  showSettings(settings);
  showSound(speaker, streamRate());
  if (name === "mode") changeMode();
  if (name === "context_rate") toast("Reload the page to play at another rate");
};

function streamRate() {
  return Number(settings.values.sample_rate);
}

function changeMode() {
  live.reset();
  typed = null;
  if (settings.values.mode === "live") $("text").value = "";
}

connection.onState = () => showConnection(connection);
connection.onPing = (rtt_ms) => {
  // One that stood in line behind audio tells of the audio.
  if (performance.now() - rtt_ms > speech.audio_ms) prebuffer.addPing(rtt_ms);
  showConnection(connection);
};
connection.onMessage = (message) => {
  const turn = speech.message(message);
  if (message.type === "session.ready") becomeReady(message);
  else if (message.type === "error" && !turn) fail(`${message.message} (${message.code})`);
  else if (message.type === "error" && message.scope === "message")
    fail(`${message.message} (${message.code})`);
  else if (message.type === "warn" && message.code !== "unsupported") toast(message.message);
};

async function becomeReady(ready) {
  offerLeads(settings, ready);
  try {
    const answer = await connection.fetchModels();
    if (!answer.ok) return;
    models = (await answer.json()).data;
    offerChoices(settings, models);
  } catch {
    // The connection has gone meanwhile; the next one asks again.
  }
}

function setToken(token) {
  connection.token = token;
  sessionStorage.setItem(TOKEN_KEY, token); // of this tab only: never in the address, never for longer
}

function start() {
  const query = new URLSearchParams(location.search);
  if (query.has("token")) setToken(query.get("token"));
  else connection.token = sessionStorage.getItem(TOKEN_KEY) ?? "";
  if (query.has("text")) $("text").value = query.get("text");
  offerFormats(settings);
  settings.set("mode", settings.values.mode); // also takes the token out of the address
  const { context_rate } = settings.values;
  speaker.open(context_rate === "device" ? null : Number(context_rate));
  connection.connect();
  setInterval(() => connection.state.name === "waiting" && showConnection(connection), 500);
  redraw();
  $("text").focus();
}

/** For the console, and for tests. */
window.playground = { speaker, connection, speech, prebuffer, centre, speak: () => speak(performance.now()) };
start();
