// Bytes of the native protocol, as a browser meets them: audio frames in, messages out.

export const FLAG_LAST = 4;

const HEADER_BYTES = 32;
const ENCODINGS = { 1: "pcm_s16le", 2: "pcm_f32le" };
export const PLAYABLE = Object.values(ENCODINGS);

/**
 * @typedef {{encoding: string, flags: number, handle: number, seq: number, pts: number, n: number,
 *   t_us: number, payload: ArrayBuffer}} AudioFrame
 */

/** @param {ArrayBuffer} buffer @returns {AudioFrame} */
export function readFrame(buffer) {
  const view = new DataView(buffer);
  if (buffer.byteLength < HEADER_BYTES || view.getUint8(0) !== 1) {
    throw new Error(`not an audio frame: ${buffer.byteLength} bytes`);
  }
  return {
    encoding: ENCODINGS[view.getUint8(1)] ?? `encoding ${view.getUint8(1)}`,
    flags: view.getUint16(2, true),
    handle: view.getUint32(4, true),
    seq: view.getUint32(8, true),
    pts: Number(view.getBigUint64(16, true)),
    n: view.getUint32(24, true),
    t_us: view.getUint32(28, true),
    payload: buffer.slice(HEADER_BYTES),
  };
}

/** Samples in [-1, 1), exactly those the server sent. @param {AudioFrame} frame */
export function samplesOf(frame) {
  if (frame.encoding === "pcm_f32le") return new Float32Array(frame.payload.slice(0));
  if (frame.encoding !== "pcm_s16le") throw new Error(`this page can't play ${frame.encoding}`);
  const integers = new Int16Array(frame.payload);
  const samples = new Float32Array(integers.length);
  for (let i = 0; i < integers.length; i++) samples[i] = integers[i] / 32768;
  return samples;
}

/** The subprotocol that carries a token: a browser can't set headers on a WebSocket. */
export function authProtocol(token) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(token));
  return "tts1.auth." + btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
