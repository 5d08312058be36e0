"use strict";
const at = (id) => document.getElementById(id);
const make = (name, kind, text) => {
  const node = document.createElement(name);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text;
  return node;
};
const makeButton = (kind, text, act) => Object.assign(make("button", kind, text), { type: "button", onclick: act });

const state = { model: "", facts: {}, chat: null, chats: [], running: null, plain: null }; // plain: its tokens/s here, once known
const isVllm = () => state.facts.backend === "vllm";

// ---- what this tab keeps, and forgets when it is closed

const memory = new Map(); // where the browser has no sessionStorage, or no room in it
const store = {
  get(name) { try { return memory.get(name) ?? sessionStorage.getItem(name) ?? ""; } catch { return ""; } },
  set(name, value) {
    memory.delete(name);
    try { sessionStorage.setItem(name, value); } catch { memory.set(name, value); }
  },
};
const KEY = "selfjudge-key", CHATS = "selfjudge-chats", THEME = "selfjudge-theme", SETTINGS = "selfjudge-settings";

// ---- the server

let asking = null; // two answers that need a key ask once
function askForKey() {
  const dialog = at("key"), input = at("key-input");
  asking ??= new Promise((resolve, reject) => {
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.querySelector("form").onsubmit = () => { store.set(KEY, input.value); resolve(); };
    dialog.onclose = () => { asking = null; reject(new Error("this server needs a key: reload the page to give one")); };
  });
  return asking;
}

async function send(path, body, signal) {
  const sent = store.get(KEY);
  const headers = { "content-type": "application/json", ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers };
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
  });
  if (response.status === 401) {
    if (sent === store.get(KEY)) await askForKey(); // else another request has asked meanwhile
    return send(path, body, signal);
  }
  if (!response.ok) {
    const answer = await response.json().catch(() => ({}));
    throw new Error(answer.error?.message ?? answer.message ?? `the server answered ${response.status}`);
  }
  return response;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

// ---- tokens of a chunk

function piecesOf(event) {
  const { tokens, cycle } = event.selfjudge ?? {};
  if (tokens) return tokens.map((token) => ({ ...token, cycle }));
  return event.choices?.[0]?.logprobs ? piecesOfVllm(event.choices[0]) : [];
}

// vLLM's logprobs are the target's own: a token below the likeliest was accepted against the target's choice
function piecesOfVllm({ delta, logprobs }) {
  let rest = delta.content ?? "";
  return logprobs.content.map(({ token, logprob, top_logprobs: top }, i, all) => {
    const text = delta.tool_calls ? token : i + 1 === all.length || !rest.startsWith(token) ? rest : token;
    rest = rest.slice(text.length);
    const best = top.reduce((a, b) => (b.logprob > a.logprob ? b : a), { token, logprob });
    const judged = best.logprob > logprob ? { target_text: best.token, target_probability: Math.exp(best.logprob) } : null;
    return { text, origin: judged ? "judge" : "unknown", probability: Math.exp(logprob), ...judged };
  });
}

// what new text of a call adds to the calls so far
function addCalls(calls, deltas) {
  for (const { index, id, function: { name, arguments: text = "" } } of deltas) {
    calls[index] ??= { id, type: "function", function: { name, arguments: "" } };
    calls[index].function.arguments += text;
  }
}
