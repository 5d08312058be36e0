
// ---- one answer: what is known about it, and its element

const cards = new WeakMap(); // an answer's element → all that is known about it
const KEPT = ["name", "body", "tokens", "said", "calls", "statistics", "cutOff", "isPlain", "isReference", "lossless", "problem", "stopped", "begun", "ended"];
const keep = (card) => Object.fromEntries(KEPT.map((name) => [name, card[name]]));

// `given`: name, body and what is kept of an answer of earlier
function addCard(turn, given) {
  const node = make("article", "card");
  const card = { node, said: "", calls: [], begun: 0, ended: 0, ...given, tokens: [], cells: [], text: "", cycle: 0, parted: -1, done: false };
  card.heading = make("h2", "", card.name);
  card.content = make("div", card.body.response_format ? "text code" : "text");
  card.content.setAttribute("role", "group");
  card.content.setAttribute("aria-label", `Answer, ${card.name}`);
  card.called = make("div", "calls");
  card.trouble = make("p", "error");
  card.trouble.hidden = true;
  card.bar = make("div", "bar-row");
  card.bar.append(make("div", "speed"), make("small"));
  card.verdict = make("p", "verdict", "reading the prompt …");
  card.figures = make("p", "figures");
  card.actions = make("div", "actions");
  card.actions.append(copyButton("text", () => card.said || card.text), copyButton("curl", () => curl(card)), copyButton("Python", () => python(card)));
  const facts = make("footer", "measures");
  facts.append(card.bar, card.verdict, card.figures, card.actions);
  node.append(card.heading, card.content, card.called, card.trouble, facts);
  node.setAttribute("aria-busy", "true");
  cards.set(node, card);
  append(card, given.tokens ?? []);
  turn.append(node);
  return card;
}

function append(card, pieces) {
  for (const piece of pieces) {
    card.cycle = piece.cycle ?? 0;
    card.tokens.push(piece);
    if (!piece.text) continue; // an end token, or a character that is not complete
    const cell = make("span", `token ${piece.origin}`, piece.text);
    if (card.inCode) cell.classList.add("code");
    card.text += piece.text;
    if (piece.text.includes("`")) card.inCode = card.text.split("```").length % 2 === 0;
    cell.dataset.i = card.tokens.length - 1;
    cell.tabIndex = card.cells.length ? -1 : 0; // one stop of the Tab key an answer, arrows from there
    card.cells.push(cell);
    card.content.append(cell);
  }
}

function read(card, event) {
  const pieces = piecesOf(event), [choice] = event.choices ?? [];
  if (pieces.length) {
    card.ended = performance.now();
    card.begun ||= card.ended;
    append(card, pieces);
  }
  card.said += choice?.delta?.content ?? "";
  addCalls(card.calls, choice?.delta?.tool_calls ?? []);
  if (choice?.finish_reason) {
    card.statistics = event.selfjudge ?? {};
    card.cutOff = choice.finish_reason === "length";
  }
}

async function stream(card, all, signal) {
  try {
    for await (const event of events(await send("v1/chat/completions", card.body, signal))) {
      if (event.error) throw new Error(event.error.message ?? event.error);
      const stays = innerHeight + scrollY > document.documentElement.scrollHeight - 60;
      read(card, event);
      refresh(all);
      if (stays) scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
    }
    if (!card.statistics) throw new Error("the connection ended before the answer did");
  } catch (error) {
    card.stopped = signal.aborted;
    card.problem = signal.aborted ? "stopped" : String(error.message).split("\n")[0];
  }
  finish(card);
  refresh(all);
}

function finish(card) {
  card.done = true;
  card.node.removeAttribute("aria-busy");
  if (!card.problem) return;
  card.trouble.className = card.stopped ? "stopped" : "error";
  card.trouble.textContent = card.problem;
  card.trouble.hidden = false;
  if (!card.stopped) card.trouble.setAttribute("role", "alert");
}

function refresh(all) {
  markParting(all);
  for (const card of all) {
    showCalls(card);
    showFigures(card, all);
  }
}

const indented = (text) => { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } };

function showCalls(card) {
  card.node.classList.toggle("called", card.calls.length > 0);
  card.calls.forEach((call, i) => {
    const shown = card.called.children[i] ?? make("section", "call");
    shown.replaceChildren(make("h3", "", call.function.name), make("pre", "", indented(call.function.arguments)));
    if (!shown.parentNode) card.called.append(shown);
  });
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
const ratio = (card, other) => (rate(card) && rate(other) ? rate(card) / rate(other) : null);

// speed over plain decoding on this machine: side by side, else by what the server or an earlier answer has measured
function speedOverPlain(card, other) {
  if (!rate(card) || isBusy(card, other)) return null;
  if (other?.isPlain) return ratio(card, other);
  if (card.statistics.speed_over_plain) state.plain = rate(card) / card.statistics.speed_over_plain;
  return state.plain ? rate(card) / state.plain : null;
}

// one sentence about an answer's speed, and what its bar shows: a speed, or passes where no speed is to be trusted
function paceOf(card, other) {
  const { statistics } = card, m = meanLength(card);
  if (!statistics && card.done) return card.tokens.length ? { passes: m, said: "Not finished: its speed is not known." } : { said: "" };
  if (!statistics) return { passes: m, said: card.tokens.length ? "decoding …" : "reading the prompt …" };
  const busy = isBusy(card, other);
  if (card.isPlain) {
    if (!busy) state.plain = rate(card);
    return { speed: busy ? null : 1, passes: 1, said: "One pass for each token." };
  }
  if (busy) return { passes: m, said: "Speed not compared: this machine is busy.", why: busy };
  const speed = speedOverPlain(card, other), beside = other && !other.isPlain && ratio(card, other);
  const overExact = beside ? `${beside.toFixed(1)} × exact here` : "";
  if (speed) {
    const why = statistics.gamma_mean === 0 ? ": drafts did not pay, so none were made" : speed < 1.05 ? ": too few drafts were accepted" : "";
    return { speed, said: `${other?.isPlain ? "" : "About "}${speed.toFixed(1)} × plain here${why}${overExact && `, ${overExact}`}.` };
  }
  if (isVllm()) return { said: overExact ? `${overExact}.` : "Speed not compared: choose exact in “Compare with”." };
  return { passes: m, said: `${overExact ? `${overExact}; not` : "Not"} compared with plain decoding: “Compare with” does that.` };
}

function showBar(card, all, { speed, passes }) {
  const value = speed ?? passes, kind = speed ? "speed" : "tokens per pass", most = Math.max(3, ...all.map((one) => one.pace?.speed ?? one.pace?.passes ?? 0));
  const [bar, name] = card.bar.children;
  bar.style.setProperty("--share", value ? value / most : 0);
  bar.style.setProperty("--plain", 1 / most);
  bar.classList.toggle("passes", Boolean(value) && !speed);
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", value ? `${kind}: ${value.toFixed(2)}, plain decoding: 1` : "speed: not known");
  name.textContent = `${kind}, plain = 1`;
  card.bar.hidden = !value && (card.done || isVllm());
}

function showFigures(card, all) {
  const other = all.find((one) => one !== card && one.isReference);
  const { rule, theta, price, gamma: set, gamma_mean: mean } = card.statistics ?? {};
  const gamma = set === "auto" && mean ? `auto (mean ${mean.toFixed(1)})` : set;
  if (rule) card.heading.replaceChildren(card.name, make("small", "", card.isPlain ? "no draft" : described({ rule, theta, price, gamma })));
  card.pace = paceOf(card, other);
  card.verdict.textContent = card.pace.said;
  card.verdict.title = card.pace.why ?? "";
  showBar(card, all, card.pace);
  if (!card.tokens.length) return; // it is still reading the prompt
  const parts = [];
  const add = (value, digits, unit, before) => {
    if (value === null) return;
    const gain = other?.statistics && card.statistics && before ? ` (${value >= before ? "+" : "−"}${Math.abs(100 * (value / before - 1)).toFixed(0)} %)` : "";
    const figure = make("span", "");
    figure.append(make("b", "", value.toFixed(digits)), ` ${unit}${gain}`);
    parts.push(figure);
  };
  const passes = card.cycle + 1, beside = other?.isPlain && other.statistics && card.statistics?.rule;
  if (!isVllm()) parts.push(make("span", "", beside ? `${passes} passes instead of ${other.cycle + 1}` : `${card.tokens.length} tokens in ${passes} ${passes === 1 ? "pass" : "passes"}`));
  const drafted = other && meanLength(other) > 1 && draftAlike(card, other); // against plain decoding m says nothing of the rule
  add(meanLength(card), 2, "tokens per pass (m)", drafted && meanLength(other));
  add(rate(card), rate(card) < 10 ? 1 : 0, "tokens/s", !isBusy(card, other) && !other?.isPlain && other && rate(other));
  const judged = card.tokens.filter((token) => token.origin === "judge").length;
  if (!card.lossless) add((100 * judged) / card.tokens.length, 0, "% judged");
  if (card.parted > 0 && !card.isReference) parts.push(make("span", "", `same for ${card.parted} tokens`));
  if (card.cutOff) parts.push(make("span", "", `cut off at ${card.tokens.length} tokens`));
  if (card.parted < 0 && all.length > 1 && all.every((one) => one.done && one.text) && all[0].text === all[1].text) parts.push(make("span", "", "same text"));
  card.figures.replaceChildren(...parts.flatMap((part, i) => (i ? [" · ", part] : [part])));
}

function markParting(all) {
  if (all.length < 2 || all[0].parted >= 0 || all[0].body.temperature) return; // sampled answers part by chance
  const [a, b] = all.map((card) => card.text);
  let same = 0;
  while (same < a.length && a[same] === b[same]) same += 1;
  const over = all.find((card) => card.text.length === same); // one is the beginning of the other
  if (over && (!over.done || over.problem || a.length === b.length)) return;
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

let hinted = null;
function hideHint() {
  at("hint").hidden = true;
  for (const cell of document.querySelectorAll(".together")) cell.classList.remove("together");
}

function showHint(cell) {
  const card = cards.get(cell.closest(".card")), token = card.tokens[Number(cell.dataset.i)];
  const list = make("dl");
  const row = (name, ...values) => {
    const dd = make("dd");
    dd.append(...values);
    list.append(make("dt", "", name), dd);
  };
  const rowOf = (name, text, p) => row(name, make("code", "", visible(text)), p === undefined ? "" : `, p ${share(p)}`);
  rowOf("token", token.text, token.probability);
  if (token.origin === "judge") {
    rowOf("target’s choice", token.target_text, token.target_probability);
    row((card.statistics?.rule ?? "judge").startsWith("judge") ? "judge’s score" : "rule’s score", isVllm() ? "not told by vLLM" : token.score === null ? "no judge in this rule" : token.score.toFixed(3));
  }
  const together = card.cells.filter((each) => token.cycle && card.tokens[Number(each.dataset.i)].cycle === token.cycle);
  if (!isVllm()) row("pass", token.cycle ? `${token.cycle}, with ${together.length} ${together.length === 1 ? "token" : "tokens"}` : "0, reading the prompt: no rule is asked");
  hideHint();
  if (together.length > 1) for (const each of together) each.classList.add("together");
  const hint = at("hint");
  if (cell.classList.contains("parts")) row("the two answers", "part here");
  hint.replaceChildren(make("p", "", ORIGINS[token.origin]), list);
  hint.hidden = false;
  hinted = cell;
  placeHint();
}

// beside the token, below it if nothing is against it; never on figures while there is room elsewhere
function placeHint() {
  const hint = at("hint");
  if (hint.hidden) return;
  const token = [...hinted.getClientRects()].at(-1), { width, height } = hint.getBoundingClientRect();
  const left = Math.max(12, Math.min(token.left, document.documentElement.clientWidth - width - 12));
  const top = 4, most = at("ask").getBoundingClientRect().top - height;
  const figures = [...document.querySelectorAll(".measures")].map((each) => each.getBoundingClientRect());
  const covered = (y, box) => (left < box.right && left + width > box.left ? Math.max(0, Math.min(y + height, box.bottom) - Math.max(y, box.top)) : 0);
  const cost = (y) => Math.abs(y - token.bottom) + 999 * Math.max(0, ...figures.map((box) => covered(y, box))) + 9999 * covered(y, token);
  const places = [token.bottom + 6, token.top - height - 6].filter((y) => y >= top && y <= most);
  for (let y = top; y <= most; y += 4) places.push(y);
  hint.style.left = `${left}px`;
  hint.style.top = `${places.reduce((best, y) => (cost(y) < cost(best) ? y : best), places[0] ?? token.bottom + 6)}px`;
}

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
  const key = store.get(KEY) ? ` -H "authorization: Bearer $SELFJUDGE_API_KEY"` : "";
  const body = JSON.stringify(plainBody(card), null, 1).replaceAll("'", "'\\''");
  return `curl ${base()}/chat/completions -H 'content-type: application/json'${key} -d '${body}'\n`;
}

function python(card) {
  const { selfjudge, vllm_xargs: xargs, ...body } = plainBody(card);
  const extra = selfjudge ? { selfjudge } : xargs ? { vllm_xargs: xargs } : null;
  const options = [...Object.entries(body), ...(extra ? [["extra_body", extra]] : [])], key = store.get(KEY);
  return [
    ...(key ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(base())}, api_key=${key ? 'os.environ["SELFJUDGE_API_KEY"]' : '"none"'})`,
    "answer = client.chat.completions.create(", ...options.map(([name, value]) => `    ${name}=${literal(value)},`), ")",
    `print(answer.choices[0].message.${body.tools ? "tool_calls" : "content"})`, "",
  ].join("\n");
}

function copyButton(name, text) {
  const button = makeButton("", name, () => copy(text(), name, button));
  button.setAttribute("aria-label", `Copy as ${name}`);
  return button;
}

async function copy(text, name, button) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyByHand(text);
  at("said").textContent = `copied as ${name}`;
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1200);
}

function copyByHand(text) { // pages without TLS have no clipboard
  const area = make("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
