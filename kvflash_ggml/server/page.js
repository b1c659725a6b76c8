"use strict";
const $ = (id) => document.getElementById(id);
const CHUNK = 64, RENDER_MS = 150, LONG = 1500, STORE = "kvflash-chat-", SETTINGS = "kvflash-settings";
const SAMPLERS = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"];
const MOST_SIDE = 1280, MOST_IMAGES = 1500000;  // pixels of an image's side; characters of images that a conversation keeps
let running = null, map = null, chosen = -1, digest = "", mine = false, words = new Map();
let chat = null, files = [], asking = "", progress = null, context = 0, kept = new Map(), editing = null, sees = false;

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

function title(one) {
  const first = one.messages[0], names = (first?.files || []).map((file) => file.name).join(", ");
  return (one.title || first?.content.trim() || names || "Conversation").slice(0, 70);
}

function written(one) {
  let left = MOST_IMAGES;  // the rest of its images lasts until the page is closed
  return JSON.stringify(one, (key, value) => {
    if (key !== "image" || typeof value !== "string") return value;
    left -= value.length;
    return left < 0 ? undefined : value;
  });
}

function save(one) {
  if (!one.messages.length) return;
  one.used = Date.now();
  const others = stored().filter((other) => other.name !== one.name);
  for (;;) {  // the browser gives a page a few MB: the conversation that was used longest ago goes first
    try { localStorage.setItem(STORE + one.name, written(one)); break; } catch {
      if (!others.length) { $("others").textContent = "This conversation is too long for the browser's storage: a reload loses it."; break; }
      localStorage.removeItem(STORE + others.pop().name);
    }
  }
  list();
}

const random = () => "page-" + Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");

async function open(one) {
  if (running) running.abort();
  stopEditing();
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
  const all = stored(), wanted = $("find").value.trim().toLowerCase();
  const has = (one) => [title(one), ...one.messages.map((message) => message.content)].some((text) => text.toLowerCase().includes(wanted));
  $("count").textContent = `(${all.length})`;
  if ($("list").querySelector("input")) return;  // a name is being typed
  $("list").replaceChildren(...all.filter((one) => !wanted || has(one)).map((one) => {
    const row = element("li"), said = title(one);
    const go = button(said, () => { open(one); $("past").open = false; $("input").focus(); });
    if (one.name === chat.name) go.setAttribute("aria-current", "true");
    row.append(go, element("span", `${new Date(one.used).toLocaleString()} · ${place(one)}`, "note"),
      button("Rename", () => rename(one, row), "Rename " + said),
      button("Markdown", () => download(one, "md", asMarkdown(one)), "Export as Markdown: " + said),
      button("JSON", () => download(one, "json", asJSON(one)), "Export as JSON: " + said),
      button("Delete", () => erase(one), "Delete " + said));
    return row;
  }));
  const known = new Set(all.map((one) => one.kept)), others = [...kept.keys()].filter((id) => !known.has(id)).length;
  $("others").textContent = others ? `The server keeps ${others} more, which other programs or browsers began.` : "";
}

function rename(one, row) {
  const field = element("input");
  field.value = title(one);
  field.setAttribute("aria-label", "Name of the conversation");
  const end = (keep) => {
    const name = field.value.trim();
    field.remove();
    if (keep && name) {
      const used = one.used;
      if (one.name === chat.name) chat.title = name;
      one.title = name;
      localStorage.setItem(STORE + one.name, written({ ...one, used }));
    }
    list();
    $("find").focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); end(true); }
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  row.firstElementChild.replaceWith(field);
  field.focus();
  field.select();
}

async function erase(one) {
  localStorage.removeItem(STORE + one.name);
  if (one.name === chat.name) open(null);
  if (kept.has(one.kept)) await fetch(ofModel("kvflash/conversations/" + encodeURIComponent(one.kept)), { method: "DELETE", headers: headers() });
  refresh();
}

async function refresh() {
  await several();
  const response = await fetch(ofModel("kvflash/conversations"), { headers: headers() });
  if (response.ok) kept = new Map((await response.json()).data.map((one) => [one.id, one]));
  list();
  const told = await fetch(ofModel("props"), { headers: headers() });
  if (!told.ok) return;
  const { modalities, default_generation_settings: usual } = await told.json();
  sees = modalities.vision;
  for (const name of SAMPLERS) $(name).placeholder = name === "seed" ? "random" : String(+usual.params[name].toFixed(3));
}

// --- conversations as files

const ROLE = /^<!-- kvflash: (system|user|assistant) -->$/m, HEADS = { system: "System prompt", user: "You", assistant: "Answer" };

function asMarkdown(one) {
  const part = (role, text) => `<!-- kvflash: ${role} -->\n**${HEADS[role]}**\n\n${text.replaceAll("<!-- kvflash:", "<!-- kvflash :")}\n`;
  const said = one.messages.map((message) => part(message.role, saying(message)));
  return [`# ${title(one)}\n`, ...(one.system.trim() ? [part("system", one.system)] : []), ...said].join("\n");
}

const asJSON = (one) => JSON.stringify({ kvflash: 1, title: title(one), system: one.system, messages: one.messages }, null, 1);

function download(one, kind, content) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([content], { type: "text/plain" }));
  link.download = title(one).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) + "." + kind;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/* Of a file, which may have anything: messages with texts alone, and the versions of each. */
function cleaned(messages) {
  const plain = (value) => (typeof value === "string" ? value : "");
  const content = (value) => (Array.isArray(value) ? value.map((part) => plain(part?.text)).join("\n") : plain(value));
  return messages.filter((one) => one && (one.role === "user" || one.role === "assistant")).map((one) => {
    const made = { role: one.role, content: content(one.content), thinking: plain(one.thinking), meta: plain(one.meta), cut: plain(one.cut) };
    made.files = (Array.isArray(one.files) ? one.files : []).map((file) => ({
      name: plain(file?.name), text: plain(file?.text), note: plain(file?.note), image: plain(file?.image).startsWith("data:image/") ? file.image : undefined,
    }));
    const others = (Array.isArray(one.others) ? one.others : []).map((other) => (Array.isArray(other) ? cleaned(other) : null));
    if (others.length > 1 && others.filter((other) => !other || !other.length).length === 1 && others.includes(null)) made.others = others;
    return made;
  });
}

function parsed(source) {
  if (!ROLE.test(source)) {
    const found = JSON.parse(source), messages = Array.isArray(found) ? found : found.messages;
    if (!Array.isArray(messages)) throw new Error("it has no list of messages");
    const system = messages.filter((one) => one?.role === "system").map((one) => one.content).join("\n");
    return { title: String(found.title || ""), system: String(found.system || system), messages: cleaned(messages) };
  }
  const [head, ...parts] = source.replaceAll("\r\n", "\n").split(ROLE), made = { title: head.replace(/^# /, "").trim(), system: "", messages: [] };
  for (let i = 0; i < parts.length; i += 2) {
    const said = parts[i + 1].replace(/^\n\*\*.*\*\*\n\n/, "").trim().replaceAll("<!-- kvflash :", "<!-- kvflash:");
    if (parts[i] === "system") made.system = said; else made.messages.push({ role: parts[i], content: said });
  }
  return { ...made, messages: cleaned(made.messages) };
}

$("bring").addEventListener("click", () => $("bringer").click());
$("bringer").addEventListener("change", async () => {
  const [file] = $("bringer").files;
  $("bringer").value = "";
  try {
    const found = parsed(await file.text());
    if (!found.messages.length) throw new Error("it has no messages");
    await open({ name: random(), kept: null, used: 0, ...found });
    save(chat);
    $("past").open = false;
    $("input").focus();
  } catch (error) {
    $("others").textContent = `${file.name} is no conversation: ${error.message}`;
  }
});
$("find").addEventListener("input", list);

// --- models, where the server has several

const wanted = () => ($("several").hidden ? {} : { model: $("which").value });
const ofModel = (path) => ($("several").hidden ? path : `${path}${path.includes("?") ? "&" : "?"}model=${encodeURIComponent($("which").value)}`);

$("which").addEventListener("change", () => { if (watching) watching.abort(); refresh(); });

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

async function textOf(pdf) {
  const response = await fetch("kvflash/pdf", { method: "POST", headers: headers({ "Content-Type": "application/pdf" }), body: pdf });
  if (!response.ok) throw new Error(await failure(response));
  return (await response.json()).text;
}

async function smaller(file) {
  const found = await createImageBitmap(file), scale = Math.min(1, MOST_SIDE / Math.max(found.width, found.height)), canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(found.width * scale));
  canvas.height = Math.max(1, Math.round(found.height * scale));
  canvas.getContext("2d").drawImage(found, 0, 0, canvas.width, canvas.height);
  return { image: canvas.toDataURL(file.type === "image/png" && scale === 1 ? "image/png" : "image/jpeg", 0.9), note: `${canvas.width} x ${canvas.height}` };
}

async function add(chosenFiles) {
  for (const file of chosenFiles) {
    const entry = { name: file.name, text: "", note: "counting tokens" };
    files.push(entry);
    attached();
    try {
      if (file.type.startsWith("image/")) {
        if (!sees) throw new Error("this model sees no images");
        Object.assign(entry, await smaller(file));
        attached();
        continue;
      }
      if (file.type === "application/pdf") entry.text = await textOf(file);
      else if (file.size > 16 * context) throw new Error(`${file.size.toLocaleString()} bytes do not fit into ${context.toLocaleString()} tokens`);
      else entry.text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
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

document.addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); add([...event.clipboardData.files]); } });

const saying = (message) => [...(message.files || []).filter((file) => file.text).map((file) => `${file.name}:\n${file.text}\n`), message.content].join("\n");

function whole(message) {
  const seen = (message.files || []).filter((file) => file.image).map((file) => ({ type: "image_url", image_url: { url: file.image } }));
  return seen.length ? [...seen, { type: "text", text: saying(message) }] : saying(message);
}

// --- versions: a message that stands where others stood has these in `others`: lists of what went on from there, null in its own place

function fork(one, index, message) {
  const old = one.messages.splice(index), others = old[0]?.others;
  if (old.length && !old[0].failed) {
    const all = others || [null];
    delete old[0].others;
    message.others = [...all.map((other) => other || old), null];
  } else if (others) message.others = others;
  one.messages.push(message);
}

function turnTo(index, which) {
  const old = chat.messages.splice(index), others = old[0].others, next = others[which];
  delete old[0].others;
  next[0].others = others.map((other, i) => (i === which ? null : other || old));
  chat.messages.push(...next);
  stopEditing();
  save(chat);
  draw();
}

function versions(message, index) {
  const box = element("span", "", "versions"), at = message.others.indexOf(null), count = message.others.length;
  const go = (label, which, name) => {
    const made = button(label, () => { if (!running) turnTo(index, which); }, name);
    made.disabled = which < 0 || which >= count;
    return made;
  };
  box.append(go("‹", at - 1, "Version before"), element("span", `${at + 1} of ${count}`), go("›", at + 1, "Next version"));
  return box;
}

function stopEditing() {
  if (editing !== null) { $("input").value = ""; files = []; attached(); }
  editing = null;
  $("editing").hidden = true;
}

$("unedit").addEventListener("click", () => { stopEditing(); $("input").focus(); });

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
    for (const file of message.files.filter((one) => one.image)) {
      const seen = element("img");
      seen.src = file.image;
      seen.alt = file.name;
      box.append(seen);
    }
  }
  if (message.thinking) {
    const more = element("details"), said = element("div", message.thinking, "thinking");
    more.append(element("summary", "Thinking"), said);
    box.append(more);
  }
  if (message.role === "user" && message.content.length > LONG) text.tabIndex = 0;
  if (message.content) box.append(text);
  if (message.others) meta.append(versions(message, index));
  if (message.preview) meta.append(element("span", message.preview, "cut"));
  if (message.cut && message.cut !== "running") meta.append(element("span", message.cut, "cut"));
  if (message.meta) meta.append(element("span", message.meta));
  if (message.content && message.cut !== "running") meta.append(copying("Copy", () => message.content));
  if (message.role === "user") {
    meta.append(button("Edit", () => {
      if (running) return;
      editing = index;
      $("editing").hidden = false;
      $("input").value = message.content;
      files = [...(message.files || [])];
      attached();
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

const sampling = () => Object.fromEntries(SAMPLERS.filter((name) => $(name).value.trim()).map((name) => [name, Number($(name).value)]));

/* index: where the answer stands; what stood there stays as another version. */
async function answer(index) {
  const own = chat, message = { role: "assistant", content: "", thinking: "", meta: "waiting", cut: "running" };
  const system = own.system.trim() ? [{ role: "system", content: own.system }] : [];
  const asked = [...system, ...own.messages.slice(0, index).map((one) => ({ role: one.role, content: whole(one) }))];
  const most = Math.max(1, Math.floor(Number($("most").value)) || 512);
  fork(own, index, message);
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
        messages: asked, stream: true, stream_options: { include_usage: true }, ...sampling(),
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
      const left = frame.kvflash && frame.kvflash.left_out;
      if (left) message.preview = `The context had no room for the ${left.toLocaleString()} oldest messages.`;
      const choice = frame.choices[0];
      if (choice) {
        reason = choice.finish_reason || reason;
        message.thinking += choice.delta.reasoning_content || "";
        message.content += choice.delta.content || "";
        if (choice.delta.content) { first = first || performance.now(); message.meta = ""; paintText(); }
      }
      if (frame.usage) {
        const t = frame.timings, cached = frame.usage.prompt_tokens_details.cached_tokens, wrong = frame.kvflash.replaced;
        message.meta = `${t.predicted_per_second.toFixed(1)} tokens a second · first after ${(((first || performance.now()) - begun) / 1000).toFixed(1)} s · ` +
          `${frame.usage.prompt_tokens.toLocaleString()} tokens, ${cached.toLocaleString()} of them known · ${frame.kvflash.page_ins} chunks came back` + (wrong ? ` · the whole text replaced ${wrong.toLocaleString()} tokens of the pool` : "");
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
  const text = $("input").value, given = files.filter((file) => file.text || file.image), last = chat.messages.length;
  if (running || !(text.trim() || given.length) || files.some((file) => file.note === "counting tokens")) return;
  const at = editing ?? (chat.messages.at(-1)?.failed ? last - 1 : last);
  stopEditing();
  $("input").value = "";
  files = [];
  attached();
  fork(chat, at, { role: "user", content: text, files: given });
  answer(at + 1);
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
$("stop").addEventListener("click", () => running && running.abort());
$("again").addEventListener("click", () => {
  const last = chat.messages.findLastIndex((message) => message.role === "user");
  if (last >= 0) answer(last + 1);
});
$("fresh").addEventListener("click", () => { open(null); $("input").focus(); });
$("system").addEventListener("input", () => { chat.system = $("system").value; });
$("past").addEventListener("toggle", () => $("past").open && refresh());
$("key").addEventListener("change", () => { if (watching) watching.abort(); refresh(); });

const fields = [...SAMPLERS, "most"];
for (const [name, value] of Object.entries(JSON.parse(localStorage.getItem(SETTINGS) || "{}"))) if (fields.includes(name)) $(name).value = value;
for (const name of fields) {
  $(name).addEventListener("change", () => localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(fields.map((one) => [one, $(one).value])))));
}

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
    const response = await fetch(ofModel(`kvflash/words?conversation=${chat.name}&chunk=${chunk}`), { headers: headers() });
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
      const response = await fetch(ofModel("kvflash/events"), { headers: headers(), signal: watching.signal });
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
