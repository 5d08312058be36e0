"use strict";
const at = (id) => document.getElementById(id);
const make = (name, kind, text) => {
  const node = document.createElement(name);
  if (kind) node.className = kind;
  if (text !== undefined) node.textContent = text;
  return node;
};

const state = { model: "", facts: {}, history: [], running: null, plain: null }; // plain: its tokens/s here, once known
const cards = new WeakMap(); // an answer's element → all that is known about it
const isVllm = () => state.facts.backend === "vllm";

// ---- the server

const KEY = "selfjudge-key";
let memory = ""; // where the browser has no sessionStorage
const readKey = () => { try { return sessionStorage.getItem(KEY) ?? memory; } catch { return memory; } };
const keepKey = (key) => { memory = key; try { sessionStorage.setItem(KEY, key); } catch { /* this page only */ } };

let asking = null; // two answers that need a key ask once
function askForKey() {
  const dialog = at("key"), input = at("key-input");
  asking ??= new Promise((resolve, reject) => {
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.querySelector("form").onsubmit = () => { keepKey(input.value); resolve(); };
    dialog.onclose = () => { asking = null; reject(new Error("this server needs a key: reload the page to give one")); };
  });
  return asking;
}

async function send(path, body, signal) {
  const sent = readKey();
  const headers = { "content-type": "application/json", ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers };
  const response = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
  });
  if (response.status === 401) {
    if (sent === readKey()) await askForKey(); // else another request has asked meanwhile
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
    const text = i + 1 === all.length || !rest.startsWith(token) ? rest : token;
    rest = rest.slice(text.length);
    const best = top.reduce((a, b) => (b.logprob > a.logprob ? b : a), { token, logprob });
    const judged = best.logprob > logprob ? { target_text: best.token, target_probability: Math.exp(best.logprob) } : null;
    return { text, origin: judged ? "judge" : "unknown", probability: Math.exp(logprob), ...judged };
  });
}

// ---- one answer

function addCard(turn, name, body) {
  const node = make("article", "card");
  const card = { node, name, body, tokens: [], cells: [], text: "", cycle: 0, parted: -1, begun: 0, ended: 0 };
  card.heading = make("h2", "", name);
  card.figures = make("p", "figures", "reading the prompt …");
  card.content = make("div", "text");
  card.content.setAttribute("role", "group");
  card.content.setAttribute("aria-label", `Answer, ${name}`);
  const header = make("header"), actions = make("div", "actions");
  header.append(card.heading, card.figures);
  actions.append(make("span", "", "copy"), copyButton("text", () => card.text), copyButton("curl", () => curl(card)), copyButton("Python", () => python(card)));
  node.append(header, card.content, actions);
  node.setAttribute("aria-busy", "true");
  cards.set(node, card);
  turn.append(node);
  return card;
}

function append(card, pieces) {
  const stays = innerHeight + scrollY > document.documentElement.scrollHeight - 90;
  const now = performance.now();
  for (const piece of pieces) {
    card.begun ||= now;
    card.ended = now;
    card.cycle = piece.cycle ?? 0;
    card.text += piece.text;
    card.tokens.push(piece);
    if (!piece.text) continue; // an end token, or a character that is not complete
    const cell = make("span", `token ${piece.origin}`, piece.text);
    cell.dataset.i = card.tokens.length - 1;
    cell.tabIndex = card.cells.length ? -1 : 0; // one stop of the Tab key an answer, arrows from there
    card.cells.push(cell);
    card.content.append(cell);
  }
  if (stays) scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}

async function stream(card, all, signal) {
  try {
    for await (const event of events(await send("v1/chat/completions", card.body, signal))) {
      if (event.error) throw new Error(event.error.message ?? event.error);
      append(card, piecesOf(event));
      if (event.choices?.[0]?.finish_reason) {
        card.statistics = event.selfjudge ?? {};
        card.cutOff = event.choices[0].finish_reason === "length";
      }
      markParting(all);
      all.forEach((one) => showFigures(one, all));
    }
    if (!card.statistics) throw new Error("the connection ended before the answer did");
  } catch (error) {
    const problem = signal.aborted ? make("p", "stopped", "stopped") : make("p", "error", String(error.message).split("\n")[0]);
    if (!signal.aborted) problem.setAttribute("role", "alert");
    card.content.after(problem);
  }
  card.done = true;
  card.node.removeAttribute("aria-busy");
  markParting(all);
  all.forEach((one) => showFigures(one, all));
}

// ---- figures, and where two answers part

const meanLength = (card) => card.statistics?.mean_accepted_length ?? (card.cycle ? (card.tokens.length - 1) / card.cycle : null);
const rate = (card) => {
  if (!card.statistics) return null; // known when it ends
  if (card.statistics.tokens_per_second) return card.statistics.tokens_per_second;
  return card.ended > card.begun ? (1000 * (card.tokens.length - 1)) / (card.ended - card.begun) : null;
};

// then a speed says nothing about another, and no ratio is shown
const isBusy = (card, other) => card.statistics?.busy || other?.statistics?.busy || "";
// tokens per pass of rules that drafted unlike numbers of tokens do not compare
const draftAlike = (card, other) => Math.abs((card.statistics?.gamma_mean ?? 0) - (other.statistics?.gamma_mean ?? 0)) < 0.5;

function speedAgainstPlain(card, other) {
  if (!card.statistics || !rate(card)) return "";
  const { speed_over_plain: own } = card.statistics, busy = isBusy(card, other);
  if (card.isPlain) {
    if (!busy) state.plain = rate(card);
    return "";
  }
  if (busy) return "";
  if (other?.isPlain) return other.statistics && rate(other) ? `${(rate(card) / rate(other)).toFixed(1)} × plain here` : "";
  if (own) state.plain = rate(card) / own;
  return state.plain ? `about ${(rate(card) / state.plain).toFixed(1)} × plain here` : "";
}

function showFigures(card, all) {
  const other = all.find((one) => one !== card && one.isReference);
  const { rule, theta, price, gamma: set, gamma_mean: mean } = card.statistics ?? {};
  const gamma = set === "auto" && mean ? `auto (mean ${mean.toFixed(1)})` : set;
  if (rule) card.heading.replaceChildren(card.name, make("small", "", card.isPlain ? "no draft" : described({ rule, theta, price, gamma })));
  if (!card.tokens.length && !card.done) return; // it is still reading the prompt
  const parts = [];
  const add = (value, digits, unit, before) => {
    if (value === null) return;
    const gain = other?.statistics && card.statistics && before ? ` (${value >= before ? "+" : "−"}${Math.abs(100 * (value / before - 1)).toFixed(0)} %)` : "";
    const figure = make("span", "");
    figure.append(make("b", "", value.toFixed(digits)), ` ${unit}${gain}`);
    parts.push(figure);
  };
  if (other?.isPlain && other.statistics && card.statistics?.rule) {
    parts.push(make("b", "", `${card.cycle + 1} passes instead of ${other.cycle + 1}`)); // whatever else the machine does
  }
  const drafted = other && meanLength(other) > 1 && draftAlike(card, other); // against plain decoding m says nothing of the rule
  add(meanLength(card), 2, "tokens per pass (m)", drafted && meanLength(other));
  const busy = isBusy(card, other);
  add(rate(card), rate(card) < 10 ? 1 : 0, "tokens/s", !busy && !other?.isPlain && other && rate(other));
  const speed = speedAgainstPlain(card, other);
  if (speed) parts.push(make("b", "speed", speed));
  if (card.statistics && busy && !card.isReference) parts.push(Object.assign(make("span", "", "machine busy: speeds not compared"), { title: busy }));
  const judged = card.tokens.filter((token) => token.origin === "judge").length;
  if (!card.lossless && card.tokens.length) add((100 * judged) / card.tokens.length, 0, "% judged");
  if (card.parted > 0 && !card.isReference) parts.push(make("span", "", `same for ${card.parted} tokens`));
  if (card.cutOff) parts.push(make("span", "", `cut off at ${card.tokens.length} tokens`));
  if (card.parted < 0 && all.length > 1 && all.every((one) => one.done && one.text)) parts.push(make("span", "", "same text"));
  card.figures.replaceChildren(...parts.flatMap((part, i) => (i ? [" · ", part] : [part])));
}

function markParting(all) {
  if (all.length < 2 || all[0].parted >= 0) return;
  const [a, b] = all.map((card) => card.text);
  let same = 0;
  while (same < a.length && a[same] === b[same]) same += 1;
  const over = all.find((card) => card.text.length === same); // one is the beginning of the other
  if (over && !(over.done && a.length !== b.length)) return;
  for (const card of all) {
    let end = 0;
    const cell = card.cells.find((each) => (end += each.textContent.length) > same);
    card.parted = cell ? card.cells.indexOf(cell) : card.cells.length;
    cell?.classList.add("parts");
  }
}

// ---- what is known about a token

const visible = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "␣");
const share = (p) => (p >= 0.0005 ? p.toFixed(3) : p.toExponential(1));
const ORIGINS = { draft: "drafted, and the target’s choice too", judge: "drafted, accepted against the target’s choice", target: "written by the target itself", unknown: "the target’s choice" };

function showHint(cell) {
  const card = cards.get(cell.closest(".card")), token = card.tokens[Number(cell.dataset.i)];
  const list = make("dl");
  const row = (name, value, code) => {
    if (value === undefined || value === null) return;
    const dd = make("dd");
    dd.append(code ? make("code", "", value) : value);
    list.append(make("dt", "", name), dd);
  };
  row("token", visible(token.text), true);
  row("p of the token", token.probability === undefined ? null : share(token.probability));
  if (token.origin === "judge") {
    row("target’s choice", visible(token.target_text), true);
    row("p of the choice", share(token.target_probability));
    row("judge’s score", isVllm() ? "not told by vLLM" : token.score === null ? "no judge in this rule" : token.score.toFixed(3));
  }
  if (!isVllm()) row("pass", token.cycle ? String(token.cycle) : "0, reading the prompt: no rule is asked");
  const hint = at("hint");
  hint.replaceChildren(make("p", "", ORIGINS[token.origin]), list);
  if (cell.classList.contains("parts")) hint.append(make("p", "", "The two answers part here."));
  hint.hidden = false;
  hinted = cell;
  placeHint();
}

function placeHint() {
  const hint = at("hint");
  if (hint.hidden) return;
  const box = hinted.getClientRects()[0], own = hint.getBoundingClientRect();
  hint.style.left = `${Math.max(12, Math.min(box.left, document.documentElement.clientWidth - own.width - 12))}px`;
  const room = at("ask").getBoundingClientRect().top - box.bottom; // below it hides no figures
  hint.style.top = `${room > own.height + 12 || box.top < own.height + 20 ? box.bottom + 6 : box.top - own.height - 6}px`;
}
let hinted = null;
const hideHint = () => { at("hint").hidden = true; };

function walk(event) {
  const cell = event.target.closest(".token");
  if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
  const { cells, tokens } = cards.get(cell.closest(".card"));
  const here = cells.indexOf(cell);
  const judged = (list) => list.find((each) => tokens[Number(each.dataset.i)].origin === "judge");
  const next = {
    ArrowRight: () => cells[here + 1], ArrowLeft: () => cells[here - 1], Home: () => cells[0], End: () => cells.at(-1),
    n: () => judged(cells.slice(here + 1)), p: () => judged(cells.slice(0, here).reverse()),
  }[event.key]?.();
  if (!next) return;
  event.preventDefault();
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// ---- copy as

const literal = (value) => {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${literal(one)}`).join(", ")}}`;
  if (typeof value === "string") return JSON.stringify(value);
  return { true: "True", false: "False", null: "None" }[String(value)] ?? JSON.stringify(value);
};
const base = () => new URL("v1", location.href).href;

// what another program would send: the whole answer at once, without what only this page needs
function plainBody(card) {
  const { stream: _, logprobs: __, top_logprobs: ___, selfjudge, ...body } = card.body;
  const { tokens: ____, ...how } = selfjudge ?? {};
  return Object.keys(how).length ? { ...body, selfjudge: how } : body;
}

function curl(card) {
  const key = readKey() ? ` -H "authorization: Bearer $SELFJUDGE_API_KEY"` : "";
  const body = JSON.stringify(plainBody(card), null, 1).replaceAll("'", "'\\''");
  return `curl ${base()}/chat/completions -H 'content-type: application/json'${key} -d '${body}'\n`;
}

function python(card) {
  const { selfjudge, vllm_xargs: xargs, ...body } = plainBody(card);
  const extra = selfjudge ? { selfjudge } : xargs ? { vllm_xargs: xargs } : null;
  const options = [...Object.entries(body), ...(extra ? [["extra_body", extra]] : [])];
  return [
    ...(readKey() ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(base())}, api_key=${readKey() ? 'os.environ["SELFJUDGE_API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(", ...options.map(([name, value]) => `    ${name}=${literal(value)},`), ")",
    "print(answer.choices[0].message.content)", "",
  ].join("\n");
}

function copyButton(name, text) {
  const button = make("button", "", name);
  button.type = "button";
  button.setAttribute("aria-label", `Copy as ${name}`);
  button.onclick = async () => {
    await copy(text());
    at("said").textContent = `copied as ${name}`;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = name; }, 1200);
  };
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", "hidden"); // pages without TLS have no clipboard
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// ---- settings

const RULES = ["exact", "judged", "margin", "fly", "topk:2", "relaxed", "typical"];
const AMOUNTS = { quality: { min: 0.5, max: 1, step: 0.01, value: 0.9 }, price: { min: 0, max: 1, step: 0.01, value: 0.1 } };
const measure = () => document.querySelector("[name=measure]:checked").value;
const ruleText = () => (at("rule").value === "other" ? at("other").value.trim() : at("rule").value);
const LOSSLESS = ["exact", "sampling"]; // they have no θ, whatever the server's is
const described = ({ off, rule, theta, quality, price, gamma }) => [
  off ? "exact" : rule, !off && !LOSSLESS.includes(rule) && (typeof theta === "number" ? `θ ${Number(theta.toFixed(3))}` : theta && `θ ${theta}`), quality && `quality ${quality}`,
  typeof price === "number" && `price ${price}`, gamma !== undefined && gamma !== null && `γ ${gamma}`,
].filter(Boolean).join(", ");

// the field `selfjudge` of the next answer; what is left out is the server's own setting
function chosen() {
  const how = {};
  if (ruleText()) how.rule = ruleText();
  if (measure()) {
    how.rule = (ruleText() || state.facts.rule).split(":")[0];
    how[measure()] = Number(at("amount").value);
  }
  const gamma = at("gamma").value;
  if (gamma) how.gamma = gamma === "auto" ? gamma : Number(gamma);
  return how;
}

const isLossless = () => LOSSLESS.includes(chosen().rule ?? state.facts.rule);
// what stands beside an answer: nothing where it would be the same request
const reference = () => (at("compare").value === "exact" && isLossless() ? "" : at("compare").value);

function refreshSettings() {
  const rule = (ruleText() || state.facts.rule || "").split(":")[0];
  const fits = { quality: rule.startsWith("judge"), price: rule === "judged" || rule === "margin" };
  for (const radio of document.querySelectorAll("[name=measure]")) {
    radio.disabled = Boolean(radio.value) && !fits[radio.value];
    if (radio.disabled && radio.checked) document.querySelector("[name=measure]").checked = true;
  }
  at("other-label").hidden = at("rule").value !== "other";
  at("amount-label").hidden = !measure();
  if (measure() && at("amount-name").textContent !== measure()) {
    Object.assign(at("amount"), AMOUNTS[measure()]);
    at("amount-name").textContent = measure();
  }
  at("amount-said").textContent = Number(at("amount").value).toFixed(2);
  at("compare").options[2].disabled = isLossless();
  const own = state.facts.gamma; // where the box names none
  if (own !== undefined) at("gamma").options[0].textContent = `the server’s: ${own}`; // else not connected yet
  at("summary").textContent = described({ ...state.facts, ...chosen() }) + (reference() ? `, beside ${reference()}` : "");
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => {
    const option = make("option", "", text);
    option.value = value;
    return option;
  }));
}

async function connect() {
  try {
    const [model] = (await (await send("v1/models")).json()).data;
    state.model = model.id;
    state.facts = model.selfjudge ?? {};
  } catch (error) {
    at("server").textContent = error.message;
    at("server").className = "error";
    return;
  }
  const { facts } = state;
  at("server").textContent = [state.model, described(facts), facts.device, facts.dtype, isVllm() && "vLLM"].filter(Boolean).join(" · ");
  const rules = RULES.filter((rule) => rule !== "judged" || facts.judge).map((rule) => [rule, rule === "exact" ? "exact (lossless)" : rule]);
  fill(at("rule"), [["", `the server’s: ${facts.rule}`], ...rules, ["other", "other …"]]);
  at("compare").value = isLossless() ? "" : "exact";
  at("compare").options[1].hidden = isVllm(); // its γ is one for all
  fill(at("gamma"), [["", ""], ["auto", "auto"], ...Array.from({ length: 21 }, (_, i) => [String(i), String(i)])]);
  at("gamma").disabled = isVllm();
  if (facts.max_tokens) at("length").max = facts.max_tokens;
  at("length").value = Math.min(Number(at("length").value), facts.max_tokens ?? Infinity);
  for (const item of document.querySelectorAll("[data-backend=torch]")) item.hidden = isVllm();
  at("missing").hidden = !isVllm();
  if (facts.recipe) {
    at("recipe-finding").textContent = `${facts.recipe.name}: ${facts.recipe.finding}`;
    at("recipe-claim").textContent = facts.refuted ? "Refuted by this server’s own requests: exact has taken over." : facts.recipe.claim;
    at("recipe").hidden = false;
  }
  refreshSettings();
}

// ---- the conversation

function requestBody(how) {
  const body = { model: state.model, messages: [...state.history], max_tokens: Number(at("length").value), temperature: 0, stream: true };
  if (!isVllm()) return { ...body, selfjudge: { ...how, tokens: true } };
  const { gamma: _, ...options } = how;
  return { ...body, logprobs: true, top_logprobs: 2, vllm_xargs: { selfjudge: JSON.stringify(options) } };
}

function addTurn(question) {
  const turn = make("section", "turn"), answers = make("div", "answers");
  turn.append(make("p", "bubble", question), answers);
  at("welcome").hidden = true;
  at("new").hidden = false;
  at("chat").append(turn);
  return answers;
}

async function ask(question) {
  const how = chosen(), lossless = isLossless();
  state.history.push({ role: "user", content: question });
  const turn = addTurn(question), all = [];
  if (reference()) {
    const isPlain = reference() === "plain", gamma = isPlain ? 0 : how.gamma ?? state.facts.gamma; // the rule alone differs
    const card = addCard(turn, isPlain ? "plain" : "lossless", requestBody({ off: true, ...(gamma === undefined ? {} : { gamma }) }));
    all.push(Object.assign(card, { isPlain, isReference: true, lossless: true }));
  }
  all.push(Object.assign(addCard(turn, lossless ? "lossless" : "relaxed", requestBody(how)), { lossless }));
  turn.parentNode.scrollIntoView({ block: "start", behavior: "instant" });
  busy(true);
  await Promise.all(all.map((card) => stream(card, all, state.running.signal)));
  busy(false);
  const answer = all.at(-1).text; // what was said goes on with this one
  if (answer) state.history.push({ role: "assistant", content: answer });
  else state.history.pop();
  at("said").textContent = all.map((card) => `${card.name}: ${card.figures.textContent}`).join("; ");
}

function busy(now) {
  state.running = now ? new AbortController() : null;
  at("send").hidden = now;
  at("stop").hidden = !now;
  at("new").disabled = now;
  if (now) at("stop").focus();
  else at("question").focus({ preventScroll: true });
}

function submit(event) {
  event?.preventDefault();
  const question = at("question").value.trim();
  if (!question || state.running || !state.model || !at("ask").reportValidity()) return;
  at("question").value = "";
  ask(question);
}

at("ask").addEventListener("submit", submit);
at("ask").addEventListener("input", refreshSettings);
at("rule").addEventListener("input", () => {
  if (at("compare").value !== "plain") at("compare").value = isLossless() ? "" : "exact"; // what a relaxed answer changes
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
at("stop").addEventListener("click", () => state.running?.abort());
at("new").addEventListener("click", () => {
  state.history = [];
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  at("welcome").hidden = false;
  at("new").hidden = true;
  at("question").focus();
});
for (const button of document.querySelectorAll("#examples button")) {
  button.addEventListener("click", () => { at("question").value = button.textContent; submit(); });
}
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideHint();
  state.running?.abort();
});
for (const [name, act] of [["mouseover", showHint], ["focusin", showHint], ["click", showHint], ["mouseout", hideHint], ["focusout", hideHint]]) {
  at("chat").addEventListener(name, (event) => {
    const cell = event.target.closest(".text .token");
    if (cell) act(cell);
  });
}
at("chat").addEventListener("keydown", walk);
addEventListener("scroll", placeHint, { passive: true });
at("settings").open = matchMedia("(min-width: 52rem)").matches;
connect();
