"use strict";
const $ = (id) => document.getElementById(id);
const CHUNK = 64, RENDER_MS = 150, LONG = 1500, STORE = "kvflash-chat-";
let running = null, map = null, chosen = -1, digest = "", mine = false, words = new Map();
let chat = null, files = [], asking = "", progress = null, context = 0, kept = new Map();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function headers(more) {
  const key = $("key").value.trim();
  return { ...more, ...(key ? { Authorization: "Bearer " + key } : {}) };
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function button(text, act, label) {
  const made = element("button", text, "link");
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", () => act(made));
  return made;
}

async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

async function failure(response) {
  try { return (await response.json()).error.message; } catch { return "HTTP " + response.status; }
}

async function post(path, body) {
  const response = await fetch(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await failure(response));
  return response.json();
}

// --- conversations in this browser

function stored() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    if (name.startsWith(STORE)) found.push(JSON.parse(localStorage.getItem(name)));
  }
  return found.sort((a, b) => b.used - a.used);
}

function save(one) {
  if (!one.messages.length) return;
  one.used = Date.now();
  const others = stored().filter((other) => other.name !== one.name);
  for (;;) {  // the browser gives a page a few MB: the conversation that was used longest ago goes first
    try { localStorage.setItem(STORE + one.name, JSON.stringify(one)); break; } catch {
      if (!others.length) { $("others").textContent = "This conversation is too long for the browser's storage: a reload loses it."; break; }
      localStorage.removeItem(STORE + others.pop().name);
    }
  }
  list();
}

async function open(one) {
  if (running) running.abort();
  const random = () => "page-" + Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
  chat = one || { name: random(), messages: [], system: chat ? chat.system : "", kept: null, used: 0 };
  for (const message of chat.messages) if (message.cut === "running") message.cut = "Cut off: the page was closed.";
  sessionStorage.setItem("kvflash-open", chat.name);
  words = new Map();
  mine = false;
  $("system").value = chat.system;
  draw();
  $("log").scrollTop = $("log").scrollHeight;
  list();
  const bytes = crypto.subtle ? await crypto.subtle.digest("SHA-256", new TextEncoder().encode(chat.name)) : new ArrayBuffer(0);
  digest = Array.from(new Uint8Array(bytes), (b) => b.toString(16).padStart(2, "0")).join("").slice(0, 16);
}

function place(one) {
  const at = kept.get(one.kept);
  if (!at) return "the server reads it again when you go on";
  const where = { device: "on the device", memory: "in host memory", folder: "in a file" }[at.where];
  return `the server keeps ${at.tokens.toLocaleString()} tokens of it ${where}`;
}

function list() {
  const all = stored();
  $("count").textContent = `(${all.length})`;
  $("list").replaceChildren(...all.map((one) => {
    const row = element("li"), first = one.messages[0], title = (first.content.trim() || first.files.map((f) => f.name).join(", ")).slice(0, 70);
    const go = button(title, () => { open(one); $("past").open = false; $("input").focus(); });
    if (one.name === chat.name) go.setAttribute("aria-current", "true");
    row.append(go, element("span", `${new Date(one.used).toLocaleString()} · ${place(one)}`, "note"),
      button("Delete", () => erase(one), "Delete " + title));
    return row;
  }));
  const known = new Set(all.map((one) => one.kept)), others = [...kept.keys()].filter((id) => !known.has(id)).length;
  $("others").textContent = others ? `The server keeps ${others} more, which other programs or browsers began.` : "";
}

async function erase(one) {
  localStorage.removeItem(STORE + one.name);
  if (one.name === chat.name) open(null);
  if (kept.has(one.kept)) await fetch("kvflash/conversations/" + encodeURIComponent(one.kept), { method: "DELETE", headers: headers() });
  refresh();
}

async function refresh() {
  const response = await fetch("kvflash/conversations", { headers: headers() });
  if (response.ok) kept = new Map((await response.json()).data.map((one) => [one.id, one]));
  list();
  await several();
}

// --- models, where the server has several

const wanted = () => ($("several").hidden ? {} : { model: $("which").value });

async function several() {
  const response = await fetch("v1/models", { headers: headers() });
  const models = response.ok ? (await response.json()).data : [];
  if (models.length < 2) return;
  const now = models.find((one) => one.status?.value === "loaded") || models[0];
  const chosen = $("several").hidden ? now.id : $("which").value;
  $("which").replaceChildren(...models.map((one) => new Option(one.id, one.id, false, one.id === chosen)));
  $("several").hidden = false;
  context = context || now.meta.n_ctx || now.meta.n_ctx_train;
}

// --- files

async function add(chosenFiles) {
  for (const file of chosenFiles) {
    const entry = { name: file.name, text: "", note: "counting tokens" };
    files.push(entry);
    attached();
    try {
      if (file.size > 16 * context) throw new Error(`${file.size.toLocaleString()} bytes do not fit into ${context.toLocaleString()} tokens`);
      entry.text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (entry.text.includes("\0")) throw new Error("this is not a text");
      const count = (await post("tokenize", { content: entry.text, ...wanted() })).tokens.length;
      if (count >= context) throw new Error(`${count.toLocaleString()} tokens, and the context has ${context.toLocaleString()}`);
      entry.note = count.toLocaleString() + " tokens";
    } catch (error) {
      entry.text = "";
      entry.note = "left out: " + (error instanceof TypeError ? "this is not a text in UTF-8" : error.message);
    }
    attached();
  }
}

function attached() {
  $("files").replaceChildren(...files.map((file) => {
    const row = element("li", `${file.name}: ${file.note} `);
    row.append(button("Remove", () => { files = files.filter((one) => one !== file); attached(); $("input").focus(); }, "Remove " + file.name));
    return row;
  }));
}

$("attach").addEventListener("click", () => $("picker").click());
$("picker").addEventListener("change", () => { add([...$("picker").files]); $("picker").value = ""; });
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("chat").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") add([...event.dataTransfer.files]);
  });
}

// --- chat

const whole = (message) => [...(message.files || []).map((file) => `${file.name}:\n${file.text}\n`), message.content].join("\n");

async function copy(text, at) {
  try { await navigator.clipboard.writeText(text); at.textContent = "Copied"; } catch { at.textContent = "The browser forbids it"; }
  const before = at.dataset.before;
  setTimeout(() => { at.textContent = before; }, 1500);
}

function copying(label, text) {
  const made = button(label, (at) => copy(text(), at));
  made.dataset.before = label;
  return made;
}

function put(box, html) {
  box.className = "said";
  box.innerHTML = html;  // the server has sanitised it, and the page's policy runs no script but this one
  for (const link of box.querySelectorAll("a")) link.target = "_blank";
  for (const part of box.querySelectorAll("pre")) part.after(copying("Copy code", () => part.textContent));
}

const rendered = new Map();

async function render(message, box) {
  const text = message.content;
  await null;  // the box is in the page then, also where the text is known already
  if (!rendered.has(text)) {
    if (rendered.size > 200) rendered.clear();
    rendered.set(text, (await post("kvflash/markdown", { text })).html);
  }
  if (box.isConnected) put(box, rendered.get(text));
}

function show(message, index) {
  const box = element("article", "", "message " + message.role), text = element("div", message.content, "said plain"), meta = element("div", "", "meta");
  box.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  if (message.files && message.files.length) {
    const names = element("ul", "", "files");
    names.append(...message.files.map((file) => element("li", `${file.name}: ${file.note}`)));
    box.append(names);
  }
  if (message.thinking) {
    const more = element("details"), said = element("div", message.thinking, "thinking");
    more.append(element("summary", "Thinking"), said);
    box.append(more);
  }
  if (message.role === "user" && message.content.length > LONG) text.tabIndex = 0;
  if (message.content) box.append(text);
  if (message.preview) meta.append(element("span", message.preview, "cut"));
  if (message.cut && message.cut !== "running") meta.append(element("span", message.cut, "cut"));
  if (message.meta) meta.append(element("span", message.meta));
  if (message.content && message.cut !== "running") meta.append(copying("Copy", () => message.content));
  if (message.role === "user") {
    meta.append(button("Edit", () => {
      if (running) return;
      $("input").value = message.content;
      files = message.files || [];
      attached();
      chat.messages = chat.messages.slice(0, index);
      draw();
      $("input").focus();
    }));
  }
  box.append(meta);
  if (message.role === "assistant" && message.content && message.cut !== "running") render(message, text).catch(() => {});
  return box;
}

function draw() {
  $("log").replaceChildren(...chat.messages.map(show));
  buttons();
}

function buttons() {
  $("again").disabled = running !== null || !chat.messages.some((m) => m.role === "assistant");
  $("stop").disabled = running === null;
  $("send").disabled = running !== null;
  $("log").setAttribute("aria-busy", String(running !== null));
}

function end() { $("log").scrollTop = $("log").scrollHeight; }

/* While an answer comes, only its own box changes: as Markdown at most every RENDER_MS, and less often if that takes long. */
function painter(message) {
  let due = 0, busy = false, again = false;
  const step = async () => {
    if (busy) { again = true; return; }
    busy = true;
    const box = $("log").lastElementChild, log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    const begun = performance.now();
    let text = box && box.querySelector(".said");
    if (box && !text) { text = element("div", "", "said plain"); box.insertBefore(text, box.lastElementChild); box.lastElementChild.textContent = ""; }
    try { if (text && message.cut === "running") await render(message, text); } catch { text.textContent = message.content; }
    if (atEnd) end();
    due = performance.now() + Math.max(RENDER_MS, 4 * (performance.now() - begun));
    await new Promise((done) => setTimeout(done, due - performance.now()));
    busy = false;
    if (again && message.cut === "running") { again = false; step(); }
  };
  return step;
}

async function answer() {
  const own = chat, message = { role: "assistant", content: "", thinking: "", meta: "waiting", cut: "running" };
  const system = own.system.trim() ? [{ role: "system", content: own.system }] : [];
  const asked = [...system, ...own.messages.map((one) => ({ role: one.role, content: whole(one) }))];
  const most = Math.max(1, Math.floor(Number($("most").value)) || 512);
  own.messages.push(message);
  running = new AbortController();
  const me = running, paintText = painter(message), begun = performance.now();
  save(own);
  draw();
  end();
  let first = 0, reason = null, cut = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      signal: me.signal,
      body: JSON.stringify({
        messages: asked, stream: true, stream_options: { include_usage: true }, temperature: Number($("temperature").value),
        max_tokens: most, ...wanted(),
        kvflash: { conversation: own.name, report: "summary", ...($("preview").checked ? { reading: "preview" } : {}) },
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const frame of frames(response)) {
      if (frame.error) throw new Error(frame.error.message);
      asking = frame.id;
      const seen = frame.kvflash && frame.kvflash.preview;
      if (seen) {
        message.preview = `Preview: from ${seen.read.toLocaleString()} of ${seen.prompt.toLocaleString()} tokens, so it can miss facts. ` +
          "The server reads all of them next.";
      }
      const choice = frame.choices[0];
      if (choice) {
        reason = choice.finish_reason || reason;
        message.thinking += choice.delta.reasoning_content || "";
        message.content += choice.delta.content || "";
        if (choice.delta.content) { first = first || performance.now(); message.meta = ""; paintText(); }
      }
      if (frame.usage) {
        const t = frame.timings, cached = frame.usage.prompt_tokens_details.cached_tokens;
        message.meta = `${t.predicted_per_second.toFixed(1)} tokens a second · first after ${(((first || performance.now()) - begun) / 1000).toFixed(1)} s · ` +
          `${frame.usage.prompt_tokens.toLocaleString()} tokens, ${cached.toLocaleString()} of them known · ${frame.kvflash.page_ins} chunks came back`;
      }
    }
    if (reason === "length") cut = `Stopped at the limit: ${most.toLocaleString()} tokens of an answer, or the context of ${context.toLocaleString()}.`;
    else if (reason === null) cut = "Cut off: the connection ended.";
  } catch (error) {
    cut = error.name === "AbortError" ? "Cancelled." : error.message;
    message.meta = "";
  }
  message.cut = cut;
  message.failed = !message.content && reason === null;
  asking = "";
  progress = null;
  if (running === me) running = null;
  save(own);
  if (own === chat) {
    const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    draw();
    if (atEnd) end();
    $("input").focus({ preventScroll: true });
  }
  tellReading([]);
  refresh();
}

function send() {
  const text = $("input").value, given = files.filter((file) => file.text);
  if (running || !(text.trim() || given.length) || files.some((file) => file.note === "counting tokens")) return;
  if (chat.messages.length && chat.messages.at(-1).failed) chat.messages.pop();
  $("input").value = "";
  files = [];
  attached();
  chat.messages.push({ role: "user", content: text, files: given });
  answer();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running && running.abort());
$("again").addEventListener("click", () => {
  while (chat.messages.length && chat.messages.at(-1).role === "assistant") chat.messages.pop();
  if (chat.messages.length) answer();
});
$("fresh").addEventListener("click", () => { open(null); $("input").focus(); });
$("system").addEventListener("input", () => { chat.system = $("system").value; });
$("past").addEventListener("toggle", () => $("past").open && refresh());
$("key").addEventListener("change", () => watching && watching.abort());

/* reading: of the server's state. Seconds left by the speed since this page saw the first figure. */
function tellReading(reading) {
  const one = reading.find((each) => each.id === asking);
  $("reading").hidden = !one;
  if (!one) return;
  const now = performance.now();
  progress = progress || { done: one.done, at: now };
  const read = one.done - progress.done, left = read > 0 ? ((one.total - one.done) / read) * (now - progress.at) / 1000 : null;
  $("bar").max = one.total;
  $("bar").value = one.done;
  $("left").textContent = `Reading the prompt: ${one.done.toLocaleString()} of ${one.total.toLocaleString()} tokens` +
    (left === null ? "" : `, about ${Math.ceil(left).toLocaleString()} s left`);
}

// --- the map

function cells() {
  const width = $("map").clientWidth || 300, n = map ? map.chunks : 0;
  let size = 14;
  while (size > 3 && Math.ceil(n / Math.floor(width / size)) * size > 260) size -= 1;
  const columns = Math.max(1, Math.floor(width / size));
  return { width, size, columns, rows: Math.max(1, Math.ceil(n / columns)) };
}

function paint() {
  const canvas = $("map"), { width, size, columns, rows } = cells(), ratio = window.devicePixelRatio || 1;
  const height = rows * size;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  if (!map) return;
  const pen = canvas.getContext("2d"), gap = size > 5 ? 1 : 0;
  pen.scale(ratio, ratio);
  const here = colour("here"), away = colour("away"), came = colour("came"), ink = colour("ink");
  for (let i = 0; i < map.chunks; i++) {
    const x = (i % columns) * size, y = Math.floor(i / columns) * size;
    pen.fillStyle = !resident(i) ? away : map.why.has(i) ? came : here;
    pen.fillRect(x, y, size - gap, size - gap);
  }
  if (chosen >= 0 && chosen < map.chunks) {
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect((chosen % columns) * size + 0.5, Math.floor(chosen / columns) * size + 0.5, size - gap - 1, size - gap - 1);
  }
}

const resident = (chunk) => (map.bits[chunk >> 3] & (128 >> (chunk & 7))) !== 0;

async function read(chunk) {
  if (!mine) return "";
  const key = `${map.length < (chunk + 1) * CHUNK ? map.length : ""}/${chunk}`;
  if (!words.has(key)) {
    const response = await fetch(`kvflash/words?conversation=${chat.name}&chunk=${chunk}`, { headers: headers() });
    if (!response.ok) return "";
    words.set(key, (await response.json()).text);
  }
  return words.get(key);
}

async function describe() {
  if (!map || chosen < 0 || chosen >= map.chunks) { $("why").textContent = map && map.chunks ? "Point at a chunk, or go with the arrow keys." : ""; return; }
  const chunk = chosen, end = Math.min(map.length, (chunk + 1) * CHUNK);
  let said = `Tokens ${(chunk * CHUNK).toLocaleString()} to ${end.toLocaleString()}: ${resident(chunk) ? "on the device" : "in host memory"}. `;
  const why = map.why.get(chunk);
  if (why !== undefined) {
    if (why === null) said += "It came back for this answer. ";
    else {
      const [layer, head, token, share, follows] = why;
      said += follows ? "It came back because of the chunk before it. "
        : `It came back because layer ${layer}, head ${head} looks at it: ${(share * 100).toFixed(share < 0.1 ? 1 : 0)} % of its attention, asked by token ${token.toLocaleString()}. `;
    }
  }
  $("why").textContent = said;
  const text = await read(chunk);
  if (chunk === chosen && text) $("why").textContent = said + "“" + text.replace(/\s+/g, " ").slice(0, 120) + "…”";
}

function choose(index) { chosen = index; paint(); describe(); }

$("map").addEventListener("pointermove", (event) => {
  if (!map) return;
  const { size, columns } = cells(), column = Math.floor(event.offsetX / size), index = Math.floor(event.offsetY / size) * columns + column;
  if (column < columns && index < map.chunks && index !== chosen) choose(index);
});
$("map").addEventListener("keydown", (event) => {
  if (!map || !map.chunks) return;
  const { columns } = cells(), steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity };
  if (!(event.key in steps)) return;
  event.preventDefault();
  choose(Math.min(map.chunks - 1, Math.max(0, (chosen < 0 ? 0 : chosen) + steps[event.key])));
});
window.addEventListener("resize", paint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

// --- what the server tells

const mib = (bytes) => (bytes / 1048576).toFixed(1) + " MiB";

function tell(state) {
  const pool = state.pool, now = state.map;
  const raw = atob(now.resident);
  map = {
    chunks: now.chunks, length: now.length, bits: Uint8Array.from(raw, (c) => c.charCodeAt(0)),
    why: new Map(now.recalled.map(([chunk, ...why]) => [chunk, why.length ? why : null])),
  };
  context = state.n_ctx;
  mine = state.seat.name_digest !== null && state.seat.name_digest === digest;
  if (mine && chat.kept !== state.seat.conversation) { chat.kept = state.seat.conversation; save(chat); }
  $("model").textContent = state.model;
  const { running: answering, waiting, put_aside: aside } = state.queue, { reading } = state;
  const others = aside ? [`${aside} wait for slow readers`] : [];
  const doing = answering ? [reading.length ? "reading a prompt" : "answering", `${waiting} waiting`, ...others] : [reading.length ? "reading behind a preview" : "idle", ...others];
  $("status").textContent = state.draining ? "shutting down" : doing.join(", ");
  tellReading(reading);
  let here = 0;
  for (let i = 0; i < map.chunks; i++) here += resident(i);
  $("used").style.width = (map.chunks ? here / map.chunks : 0) * 100 + "%";
  $("pool").textContent = (map.chunks ? `${here.toLocaleString()} of ${map.chunks.toLocaleString()} chunks are on the device: ` +
    `${map.length.toLocaleString()} tokens of ${mine ? "this conversation" : "another conversation"}, ${CHUNK} a chunk. ` : "No text is on the device. ") +
    `The pool has room for ${(pool.pool / CHUNK).toLocaleString()} chunks (${pool.pool.toLocaleString()} tokens, ${mib(pool.device_bytes)})` +
    (map.chunks && pool.share < pool.pool ? `, ${(pool.share / CHUNK).toLocaleString()} of them for this text; ` : "; ") +
    `a conversation may have ${context.toLocaleString()} tokens.`;
  const missed = now.evicted_mass;
  $("missed").textContent = missed === null ? "" : `About ${(missed * 100).toFixed(0)} % of the attention goes to text that is not on the device.`;
  const rows = [
    ["policy", pool.policy], ["tokens a second", state.speed.tokens], ["chunks in a second", state.speed.page_ins], ["chunks out a second", state.speed.page_outs],
    ["chunks in, in all", pool.page_ins.toLocaleString()], ["chunks out, in all", pool.page_outs.toLocaleString()],
    ["in host memory", mib(pool.host_bytes)], ["in the spill file", mib(pool.spilled_bytes)],
    ["conversations on the device, in memory, in files", `${state.conversations.device}, ${state.conversations.memory}, ${state.conversations.folder}`],
    ["swapped out, in", `${state.seat.parks}, ${state.seat.resumes}`],
  ];
  $("traffic").replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
    head.textContent = name;
    cell.textContent = value;
    row.append(head, cell);
    return row;
  }));
  paint();
  describe();
}

let watching = null;

async function watch() {
  for (;;) {
    watching = new AbortController();
    try {
      const response = await fetch("kvflash/events", { headers: headers(), signal: watching.signal });
      if (!response.ok) throw new Error(await failure(response));
      for await (const state of frames(response)) tell(state);
      $("status").textContent = "the server has ended";
    } catch (error) {
      if (error.name !== "AbortError") $("status").textContent = error.message;
    }
    await new Promise((done) => setTimeout(done, 1500));
  }
}

open(stored().find((one) => one.name === sessionStorage.getItem("kvflash-open")) || null);
paint();
watch();
refresh();
$("input").focus();
