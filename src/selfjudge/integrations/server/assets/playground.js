
// ---- conversations: a chat is a list of turns; each has what was asked, and answers of which the last goes on

// what `asked` follows: a call whose result nobody gave says so, since templates want one
function messagesBefore(asked) {
  const messages = [];
  const add = (next) => {
    const open = messages.at(-1)?.tool_calls ?? [], missing = open.filter(({ id }) => !next.some((one) => one.tool_call_id === id));
    messages.push(...missing.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "no result" })), ...next);
  };
  for (const turn of state.chat.turns) {
    const { said, calls } = turn.cards.at(-1);
    if (!said && !calls.length) continue; // the next question does not follow one without an answer
    add([...turn.asked, { role: "assistant", content: said || null, ...(calls.length ? { tool_calls: calls } : {}) }]);
  }
  add(asked);
  return messages;
}

function requestBody(asked, how) {
  const told = at("system").value.trim(), messages = messagesBefore(asked);
  if (told) messages.unshift({ role: "system", content: told });
  const body = { model: state.model, messages, ...chosenFields(), stream: true };
  if (asked[0].role === "tool") delete body.tool_choice; // after a result the model may answer
  if (!isVllm()) return { ...body, selfjudge: { ...how, tokens: true } };
  const { gamma: _, ...options } = how;
  return { ...body, logprobs: true, top_logprobs: 2, ...(Object.keys(options).length && { vllm_xargs: { selfjudge: JSON.stringify(options) } }) };
}

// the request of the answer, and before it that of what it is compared with
function requests(asked) {
  const how = chosen(), sent = requestBody(asked, how), lossless = isLossless(sent), against = reference(sent);
  const own = { name: lossless ? "Lossless" : "Relaxed", lossless, body: sent };
  if (!against) return [own];
  const isPlain = against === "plain", gamma = isPlain ? 0 : how.gamma ?? state.facts.gamma; // the rule alone differs
  const body = requestBody(asked, { off: true, ...(gamma === undefined ? {} : { gamma }) });
  return [{ name: isPlain ? "Plain decoding" : "Lossless", isPlain, isReference: true, lossless: true, body }, own];
}

function addTurn({ question }) {
  const turn = make("section", "turn"), answers = make("div", "answers");
  turn.append(make("p", "bubble", question), answers);
  at("welcome").hidden = true;
  at("chat").append(turn);
  return answers;
}

async function ask(question, asked = [{ role: "user", content: question }]) {
  const { chat } = state, turn = { question, asked, cards: [] }, wanted = requests(asked);
  const answers = addTurn(turn), all = turn.cards;
  all.push(...wanted.map((given) => addCard(answers, given)));
  chat.title ||= question;
  chat.turns.push(turn);
  for (const old of document.querySelectorAll(".again, .results")) old.remove();
  answers.parentNode.scrollIntoView({ block: "start", behavior: "instant" });
  busy(true);
  await Promise.all(all.map((card) => stream(card, all, state.running.signal)));
  busy(false);
  offerMore(turn);
  keepChats();
  at("said").textContent = all.map((card) => `${card.name}: ${card.problem ?? `${card.verdict.textContent} ${card.figures.textContent}`}`).join("; ");
}

// what may follow the last turn: the question again, or results of the tools it called
function offerMore(turn) {
  const card = turn.cards.at(-1);
  const again = makeButton("again", card.problem && !card.stopped ? "Try again" : "Ask again", () => {
    state.chat.turns.pop();
    document.querySelector(".turn:last-child").remove();
    ask(turn.question, turn.asked);
  });
  card.actions.append(again);
  if (card.calls.length && !card.problem && !card.cutOff) card.called.append(resultForm(card.calls));
}

function resultForm(calls) {
  const form = make("form", "results"), inputs = calls.map((call) => {
    const label = make("label", "", `Result of ${call.function.name}`), input = make("input");
    Object.assign(input, { required: true, autocomplete: "off", placeholder: "what the tool returns" });
    label.append(input);
    form.append(label);
    return input;
  });
  form.append(Object.assign(make("button", "", "Send"), { type: "submit" }));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (state.running) return;
    const results = calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: inputs[i].value }));
    ask(calls.map((call, i) => `${call.function.name} → ${inputs[i].value}`).join("\n"), results);
  };
  return form;
}

function busy(now) {
  const focused = [at("send"), at("stop")].includes(document.activeElement);
  state.running = now ? new AbortController() : null;
  at("send").hidden = now;
  at("stop").hidden = !now;
  at("new").disabled = now;
  for (const button of at("chats").querySelectorAll("button")) button.disabled = now;
  if (focused) at(now ? "stop" : "question").focus({ preventScroll: true });
}

function submit(event) {
  event?.preventDefault();
  const question = at("question").value.trim();
  if (!question || state.running || !state.model) return;
  chosenFields();
  if (!at("settings").checkValidity()) {
    openMenu(true);
    at("settings").querySelector(":invalid").closest("details").open = true;
    at("settings").reportValidity();
    return;
  }
  openMenu(false);
  at("question").value = "";
  ask(question);
}

// ---- the chats of this tab

function keepChats() {
  const kept = state.chats.filter((chat) => chat.turns.length);
  store.set(CHATS, JSON.stringify(kept.map(({ title, turns }) => ({ title, turns: turns.map((turn) => ({ ...turn, cards: turn.cards.map(keep) })) }))));
  listChats();
}

function listChats() {
  const kept = state.chats.filter((chat) => chat.turns.length);
  at("earlier").hidden = !kept.length;
  at("chats").replaceChildren(...kept.toReversed().map((chat) => {
    const item = make("li"), open = makeButton("", chat.title, () => showChat(chat)), remove = makeButton("icon", "×", () => removeChat(chat));
    open.title = chat.title;
    if (chat === state.chat) open.setAttribute("aria-current", "true");
    remove.setAttribute("aria-label", `Delete ${chat.title}`);
    open.disabled = remove.disabled = Boolean(state.running);
    item.append(open, remove);
    return item;
  }));
}

function showChat(chat) {
  state.chat = chat;
  hideHint();
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  at("welcome").hidden = chat.turns.length > 0;
  for (const turn of chat.turns) {
    const answers = addTurn(turn);
    turn.cards = turn.cards.map((card) => addCard(answers, card));
    turn.cards.forEach(finish);
    refresh(turn.cards);
  }
  if (chat.turns.length) offerMore(chat.turns.at(-1));
  listChats();
  openMenu(false);
}

function newChat() {
  if (state.chat?.turns.length !== 0) state.chats.push({ title: "", turns: [] });
  showChat(state.chats.at(-1));
  at("question").focus();
}

function removeChat(chat) {
  state.chats = state.chats.filter((one) => one !== chat);
  if (chat === state.chat) newChat();
  keepChats();
}

function restoreChats() {
  try { state.chats = JSON.parse(store.get(CHATS) || "[]"); } catch { state.chats = []; }
  if (state.chats.length) showChat(state.chats.at(-1));
  else newChat();
}

// ---- the page

function openMenu(open) {
  document.body.classList.toggle("menu", open);
  at("menu").setAttribute("aria-expanded", String(open));
  if (open) at("side").focus();
}

async function connect() {
  at("reconnect").hidden = true;
  at("server").className = "";
  at("server").textContent = "connecting …";
  try {
    const [model] = (await (await send("v1/models")).json()).data;
    state.facts = model.selfjudge ?? {};
    state.model = model.id;
  } catch (error) {
    at("server").textContent = error.message;
    at("server").className = "error";
    at("reconnect").hidden = false;
    return;
  }
  const { facts } = state;
  at("server").textContent = [state.model, described(facts), facts.device, facts.dtype, isVllm() && "vLLM"].filter(Boolean).join(" · ");
  for (const item of document.querySelectorAll("[data-backend=torch]")) item.hidden = isVllm();
  at("missing").hidden = !isVllm();
  if (facts.recipe) {
    at("recipe-finding").textContent = `${facts.recipe.name}: ${facts.recipe.finding}`;
    at("recipe-claim").textContent = facts.refuted ? "Refuted by this server’s own requests: exact has taken over." : facts.recipe.claim;
    at("recipe").hidden = false;
  }
  offerSettings();
  restoreChats();
}

at("ask").addEventListener("submit", submit);
at("settings").addEventListener("submit", (event) => event.preventDefault());
for (const kind of ["input", "focusout"]) at("settings").addEventListener(kind, refreshSettings);
at("rule").addEventListener("input", chooseRule);
at("tools-example").addEventListener("click", () => { at("tools").value = pretty(EXAMPLE_TOOLS); refreshSettings(); });
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
at("stop").addEventListener("click", () => state.running?.abort());
at("new").addEventListener("click", newChat);
at("share").addEventListener("click", () => copy(link(), "a link", at("share")));
at("theme").addEventListener("click", switchTheme);
at("menu").addEventListener("click", () => openMenu(!document.body.classList.contains("menu")));
at("shade").addEventListener("click", () => openMenu(false));
at("reconnect").addEventListener("click", connect);
for (const button of document.querySelectorAll("#examples button")) {
  button.addEventListener("click", () => {
    const { compare, format = "", choice } = button.dataset;
    if (compare && !isVllm()) at("compare").value = compare;
    at("format").value = format;
    if (choice) Object.assign(at("tools"), { value: pretty(EXAMPLE_TOOLS) });
    else if (at("tools").value === pretty(EXAMPLE_TOOLS)) at("tools").value = "";
    at("choice").value = choice ?? "";
    restoreSettings(describeSettings(button.querySelector("span").textContent));
    submit();
  });
}
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideHint();
  openMenu(false);
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
addEventListener("hashchange", () => { if (location.hash && state.model) restoreSettings(location.hash.slice(1)); });
system.addEventListener("change", showTheme);
showTheme();
connect();
