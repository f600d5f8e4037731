// A turn taken out of the page: as a WAV, as a `realtime probe` command, as Python.

/** @param {import("./turn.js").Turn} turn @returns {Blob} */
export function wavOf(turn) {
  const bytes = turn.chunks.reduce((sum, chunk) => sum + chunk.byteLength, 0);
  const isFloat = turn.encoding === "pcm_f32le";
  const width = isFloat ? 4 : 2;
  const head = new DataView(new ArrayBuffer(44));
  const text = (at, word) => [...word].forEach((c, i) => head.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  head.setUint32(4, 36 + bytes, true);
  text(8, "WAVEfmt ");
  head.setUint32(16, 16, true);
  head.setUint16(20, isFloat ? 3 : 1, true);
  head.setUint16(22, 1, true);
  head.setUint32(24, turn.rate, true);
  head.setUint32(28, turn.rate * width, true);
  head.setUint16(32, width, true);
  head.setUint16(34, 8 * width, true);
  text(36, "data");
  head.setUint32(40, bytes, true);
  return new Blob([head, ...turn.chunks], { type: "audio/wav" });
}

/** @param {import("./turn.js").Turn} turn @param {{url: string, hasToken: boolean}} server */
export function probeCommand(turn, { url, hasToken }) {
  const { format, voice } = turn.fields;
  const words = ["realtime", "probe", quote(url), "--text", quote(turn.text)];
  words.push("--tokens-per-s", String(turn.tokens?.tokens_per_s ?? 0));
  if (turn.tokens?.jitter) words.push("--jitter", String(turn.tokens.jitter));
  if (voice) words.push("--voice", quote(voice));
  words.push("--encoding", quote(format.encoding), "--sample-rate", quote(String(format.sample_rate)));
  if (hasToken) words.push("--token", '"$REALTIME_TOKEN"');
  return words.join(" ");
}

/** @param {import("./turn.js").Turn} turn @param {{url: string, hasToken: boolean}} server */
export function pythonSnippet(turn, { url, hasToken }) {
  const { encoding, sample_rate } = turn.fields.format;
  const token = hasToken ? ', token=os.environ["REALTIME_TOKEN"]' : "";
  const { words: _words, metrics: _metrics, client: _client, ...fields } = turn.fields;
  const settings = Object.entries(fields).map(([name, value]) => `        ${name}=${python(value)},`);
  const send = turn.tokens
    ? [
        '        for delta in TEXT.split(" "):  # as a language model would write it',
        '            await speech.send(delta + " ")',
        `            await asyncio.sleep(1 / ${turn.tokens.tokens_per_s})`,
        "        await speech.end()",
      ]
    : ["        await speech.send(TEXT, end=True)"];
  return [
    "import asyncio",
    ...(hasToken ? ["import os"] : []),
    "",
    "from realtime.audio import write_wav",
    "from realtime.client import connect",
    "",
    `TEXT = ${python(turn.text)}`,
    "",
    "",
    "async def main() -> None:",
    `    async with connect(${python(url)}${token}) as tts:`,
    "        speech = tts.context(",
    ...settings.map((line) => "    " + line),
    "        )",
    ...send,
    '        pcm = b"".join([frame.payload async for frame in speech.audio()])',
    `    write_wav("turn.wav", pcm, ${sample_rate}, 1, ${python(encoding)})`,
    "",
    "",
    "asyncio.run(main())",
    "",
  ].join("\n");
}

/** A word for a POSIX shell. */
function quote(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}

/** Strings, numbers and objects are written alike in JSON and in Python. */
function python(value) {
  return JSON.stringify(value);
}
