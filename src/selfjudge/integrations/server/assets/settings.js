
// ---- settings of the next answer

const RULES = {
  exact: ["exact (lossless)", "The words of the large model alone."],
  judged: ["judged", "A learned judge also accepts drafts that the target would have said otherwise."],
  margin: ["margin", "Accepts a draft that the target holds nearly as likely as its own choice."],
  fly: ["fly", "Accepts a mismatch where the target is unsure and the next drafts match again."],
  "topk:2": ["topk:2", "Accepts the target’s second choice, too."],
  relaxed: ["relaxed", "Accepts drafts among the target’s ten likeliest whose probability is near the best."],
  typical: ["typical", "Accepts drafts that are likely enough for how sure the target is."],
};
const AMOUNTS = { quality: { min: 0.5, max: 1, step: 0.01, value: 0.9 }, price: { min: 0, max: 1, step: 0.01, value: 0.1 } };
const LOSSLESS = ["exact", "sampling"]; // they have no θ, whatever the server's is
const measure = () => document.querySelector("[name=measure]:checked").value;
const ruleText = () => (at("rule").value === "other" ? at("other").value.trim() : at("rule").value);
const described = ({ off, rule, theta, quality, price, gamma }) => [
  off ? "exact" : rule,
  !off && !LOSSLESS.includes(rule) && (typeof theta === "number" || theta) && `threshold (θ) ${typeof theta === "number" ? Number(theta.toFixed(3)) : theta}`,
  quality && `quality ${quality}`, typeof price === "number" && `price ${price}`,
  gamma !== undefined && gamma !== null && `drafted per step (γ) ${gamma}`,
].filter(Boolean).join(", ");

// the field `selfjudge`; what is left out is the server's own setting
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

const EXAMPLE_SCHEMA = { type: "object", properties: { name: { type: "string", maxLength: 40 }, city: { type: "string", maxLength: 40 }, age: { type: "integer" } }, required: ["name", "city", "age"], additionalProperties: false };
const EXAMPLE_TOOLS = [{ name: "get_weather", description: "The weather in a city, now.", parameters: { type: "object", properties: { city: { type: "string", maxLength: 40 }, unit: { enum: ["celsius", "fahrenheit"] } }, required: ["city", "unit"], additionalProperties: false } }];
const pretty = (value) => JSON.stringify(value, null, 2);

function readSchema() {
  const schema = JSON.parse(at("schema").value || "null");
  if (typeof schema !== "object" || !schema || Array.isArray(schema)) throw new Error("give a schema: a JSON object");
  return schema;
}

function readTools() {
  const tools = JSON.parse(at("tools").value || "[]");
  if (!Array.isArray(tools)) throw new Error("give a list of functions");
  return tools.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
}

// the value; what is wrong with it stands below its field, unless somebody is still typing there
function check(name, reader) {
  const problem = at(`${name}-problem`);
  let value = null, said = "";
  try { value = reader(); } catch (error) { said = error.message; }
  problem.textContent = said;
  problem.hidden = !said || document.activeElement === at(name);
  at(name).setCustomValidity(said);
  at(name).setAttribute("aria-invalid", String(Boolean(said)));
  return value;
}

// fields of the next request besides the messages and `selfjudge`
function chosenFields() {
  const fields = { max_tokens: Number(at("length").value), temperature: Number(at("temperature").value) };
  const format = at("format").value, schema = check("schema", format === "json_schema" ? readSchema : () => null), tools = check("tools", readTools);
  if (format) fields.response_format = { type: format, ...(schema && { json_schema: { name: "answer", schema, strict: true } }) };
  if (tools?.length) {
    const choice = at("choice").value;
    Object.assign(fields, { tools, ...(choice && { tool_choice: "required" }), ...(choice === "one" && { parallel_tool_calls: false }) });
  }
  return fields;
}

// whether every rule verifies these fields exactly; vLLM has no grammar for calls that the model need not make
const isFormed = ({ response_format, tools, tool_choice }) => Boolean(response_format || (tools && (tool_choice || !isVllm())));
const isLossless = (fields = chosenFields()) => isFormed(fields) || LOSSLESS.includes(chosen().rule ?? state.facts.rule);
// what stands beside an answer: nothing where it would be the same request
const reference = (fields) => (at("compare").value === "exact" && isLossless(fields) ? "" : at("compare").value);

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
  at("temperature-said").textContent = Number(at("temperature").value) ? at("temperature").value : "0, greedy";
  at("schema-label").hidden = at("format").value !== "json_schema";
  if (at("format").value === "json_schema" && !at("schema").value) at("schema").value = pretty(EXAMPLE_SCHEMA);
  const fields = chosenFields();
  at("compare").options[2].disabled = isLossless(fields);
  at("rule-note").textContent = isFormed(fields) ? "Under a schema or tools every rule verifies exactly." : RULES[at("rule").value === "topk:2" ? "topk:2" : rule]?.[1] ?? "";
  const own = state.facts.gamma; // where the box names none
  if (own !== undefined) at("gamma").options[0].textContent = `the server’s: ${own}`; // else not connected yet
  store.set(SETTINGS, describeSettings());
}

// a relaxed answer begins beside the lossless one
function chooseRule() {
  if (at("compare").value !== "plain") at("compare").value = isLossless() ? "" : "exact";
}

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => Object.assign(make("option", "", text), { value })));
}

function offerSettings() {
  const { facts } = state;
  const rules = Object.entries(RULES).filter(([rule]) => rule !== "judged" || facts.judge).map(([rule, [name]]) => [rule, name]);
  fill(at("rule"), [["", `the server’s: ${facts.rule}`], ...rules, ["other", "other …"]]);
  at("compare").value = isLossless() ? "" : "exact";
  at("compare").options[1].hidden = isVllm(); // its γ is one for all
  fill(at("gamma"), [["", ""], ["auto", "auto"], ...Array.from({ length: 21 }, (_, i) => [String(i), String(i)])]);
  at("gamma").disabled = isVllm();
  if (facts.max_tokens) at("length").max = facts.max_tokens;
  at("length").value = Math.min(Number(at("length").value), facts.max_tokens ?? Infinity);
  restoreSettings(location.hash.slice(1) || store.get(SETTINGS));
}

// ---- a link to the settings: after its #, which no browser sends to a server; it never holds the key

const FIELDS = ["rule", "other", "compare", "gamma", "system", "temperature", "length", "format", "schema", "tools", "choice"];

function describeSettings(question = "") {
  const values = Object.fromEntries(FIELDS.map((name) => [name, at(name).value]));
  if (measure()) Object.assign(values, { measure: measure(), amount: at("amount").value });
  if (question) values.question = question;
  return new URLSearchParams(values).toString();
}

function restoreSettings(text) {
  const values = new URLSearchParams(text);
  for (const name of [...FIELDS, "question"]) {
    const value = values.get(name), field = at(name);
    if (value === null || (field.options && ![...field.options].some((option) => option.value === value))) continue;
    field.value = value;
  }
  const radio = [...document.querySelectorAll("[name=measure]")].find((each) => each.value === (values.get("measure") ?? ""));
  if (radio) radio.checked = true;
  refreshSettings();
  if (measure() && values.has("amount")) at("amount").value = values.get("amount");
  if (at("tools").value.trim()) at("tools-group").open = true;
  refreshSettings();
}

const link = () => `${location.origin}${location.pathname}#${describeSettings(at("question").value || state.chat?.turns[0]?.question || "")}`;

// ---- dark or light: as the system, unless the switch says otherwise

const system = matchMedia("(prefers-color-scheme: dark)");
function showTheme() {
  const own = store.get(THEME);
  if (own) document.documentElement.dataset.theme = own;
  else delete document.documentElement.dataset.theme;
  at("theme").setAttribute("aria-pressed", String(own ? own === "dark" : system.matches));
}

function switchTheme() {
  const next = at("theme").getAttribute("aria-pressed") === "true" ? "light" : "dark";
  store.set(THEME, next === (system.matches ? "dark" : "light") ? "" : next); // back with the system, it follows it again
  showTheme();
}
