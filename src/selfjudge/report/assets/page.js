"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const make = (name, text, kind) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };

  // theme: auto, light, dark; remembered where the browser allows it
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;
  const button = at("theme");
  const recall = () => { try { return localStorage.getItem("selfjudge-theme"); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem("selfjudge-theme", name); } catch { /* not remembered then */ } };
  const dress = (name) => {
    if (name === "auto") delete root.dataset.theme; else root.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    button.dataset.now = name;
  };
  dress(THEMES.includes(recall()) ? recall() : "auto");
  button.hidden = false;
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(button.dataset.now) + 1) % THEMES.length];
    keep(next);
    dress(next);
  });

  // folded sections open where a link leads, and on paper
  const unfold = () => {
    const place = location.hash.length > 1 && at(decodeURIComponent(location.hash.slice(1)));
    const fold = place && (place.closest(".fold") ?? place.querySelector(".fold"));
    if (fold) fold.open = true;
  };
  addEventListener("hashchange", unfold);
  addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll(".fold")) fold.open = true; });
  unfold();

  // filter: rows and charts that belong to a task or a rule
  const filter = at("filter");
  if (filter) {
    const task = at("filter-task"), rule = at("filter-rule"), said = at("filter-said");
    const blocks = [...document.querySelectorAll("[data-block]")];
    const apply = () => {
      const kind = rule.value.slice(0, 2), name = rule.value.slice(2);
      let shown = 0, all = 0;
      for (const row of document.querySelectorAll("tr[data-row]")) {
        const fits = (!task.value || !row.dataset.task || row.dataset.task === task.value)
          && (!name || !row.dataset.rule || (kind === "m:" ? row.dataset.method : row.dataset.rule) === name);
        row.hidden = !fits;
        all += 1;
        shown += fits;
      }
      for (const facet of document.querySelectorAll("figure[data-task]"))
        facet.hidden = Boolean(task.value && facet.dataset.task && facet.dataset.task !== task.value);
      for (const block of blocks) block.hidden = !block.querySelector("tr[data-row]:not([hidden])");
      said.textContent = `${shown} of ${all} rows`;
    };
    filter.hidden = false;
    task.addEventListener("change", apply);
    rule.addEventListener("change", apply);
    at("filter-clear").addEventListener("click", () => { task.value = ""; rule.value = ""; apply(); });
    apply();
  }

  // viewer
  if (!at("token-viewer")) return;
  const pick = { task: at("pick-task"), rule: at("pick-rule"), example: at("pick-example") };
  const tokens = at("tokens"), details = at("details");
  const fill = (select, options, wanted) => {
    select.replaceChildren(...options.map(([value, text]) => {
      const option = make("option", text);
      option.value = value;
      return option;
    }));
    if (options.some(([value]) => value === wanted)) select.value = wanted;
  };
  const visible = (text) => text === "" ? "∅ (no text)" : JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "␣");
  const share = (p) => (p === null ? "–" : p >= 0.0005 ? p.toFixed(3) : p.toExponential(1));
  const ORIGIN = { draft: "draft, and the target's choice too", judge: "draft, accepted against the target's choice", target: "target" };
  let current = 0, example = null, cells = [];

  const entry = (list, name, value) => list.append(make("dt", name), make("dd", value));
  const describe = (index) => {
    const [text, origin, choice, p, best, judge, cycle] = example.tokens[index];
    const list = make("dl");
    entry(list, "token", visible(text));
    entry(list, "origin", ORIGIN[origin]);
    entry(list, "target's choice", choice === "" ? "–" : visible(choice));
    entry(list, "p of the token", share(p));
    entry(list, "p of the choice", share(best));
    entry(list, "judge's score", judge === null || cycle === 0 ? "not asked" : judge.toFixed(3));
    entry(list, "cycle", cycle === null ? "–" : cycle === 0 ? "0 (prefill)" : String(cycle));
    details.replaceChildren(make("h3", `Token ${index + 1} of ${example.tokens.length}`), list);
    cells.forEach((cell, i) => cell.classList.toggle("together", cycle !== null && example.tokens[i][6] === cycle));
  };
  const go = (index, focus) => {
    if (!cells.length) return;
    const next = Math.max(0, Math.min(cells.length - 1, index));
    cells[current].tabIndex = -1;
    cells[current].setAttribute("aria-selected", "false");
    current = next;
    cells[next].tabIndex = 0;
    cells[next].setAttribute("aria-selected", "true");
    if (focus) cells[next].focus();
    describe(next);
  };
  const judged = (step) => {
    for (let i = current + step; i >= 0 && i < cells.length; i += step) if (example.tokens[i][1] === "judge") return i;
    return current;
  };
  const line = (step) => { // the token above or below: the nearest of the next line
    const here = cells[current].getClientRects()[0];
    let best = current, distance = Infinity, row = null;
    for (let i = current + step; i >= 0 && i < cells.length; i += step) {
      const box = cells[i].getClientRects()[0];
      if (!box || Math.abs(box.top - here.top) < 4) continue;
      if (row === null) row = box.top;
      if (Math.abs(box.top - row) >= 4) break;
      if (Math.abs(box.left - here.left) < distance) [best, distance] = [i, Math.abs(box.left - here.left)];
    }
    return best;
  };
  const KEYS = {
    ArrowRight: () => current + 1, ArrowLeft: () => current - 1, ArrowDown: () => line(1), ArrowUp: () => line(-1),
    Home: () => 0, End: () => cells.length - 1, n: () => judged(1), p: () => judged(-1),
  };
  tokens.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    go(KEYS[event.key](), true);
  });
  const index = (event) => {
    const cell = event.target.closest(".token");
    return cell ? Number(cell.dataset.i) : -1;
  };
  tokens.addEventListener("mouseover", (event) => { if (index(event) >= 0) describe(index(event)); });
  tokens.addEventListener("mouseleave", () => describe(current));
  tokens.addEventListener("click", (event) => { if (index(event) >= 0) go(index(event), true); });
  tokens.addEventListener("focusin", (event) => { if (index(event) >= 0 && index(event) !== current) go(index(event)); });

  const showExact = (run) => { // the answer of exact to the same example, below
    const same = (other) => other.group === run.group && other.name === `exact,${run.name.slice(run.name.lastIndexOf(" γ"))}`;
    const found = run.name.startsWith("exact,") ? null : data.runs.find(same)?.examples.find((e) => e.id === example.id);
    at("beside").hidden = !found;
    at("exact-tokens").replaceChildren(...(found?.tokens ?? []).map(([text, origin]) => make("span", text, `token ${origin}`)));
  };
  const show = () => {
    const run = data.runs[Number(pick.rule.value)];
    example = run.examples[Number(pick.example.value)];
    at("prompt").textContent = example.prompt;
    const counts = { draft: 0, judge: 0, target: 0 };
    cells = example.tokens.map(([text, origin], i) => {
      counts[origin] += 1;
      const cell = make("span", undefined, `token ${origin}`);
      text.split("\n").forEach((part, k) => { // a line end is shown, and ends the line
        if (k) cell.append(make("span", "⏎", "end"), "\n");
        cell.append(part);
      });
      if (text === "") cell.append(make("span", "∅", "end"));
      cell.dataset.i = i;
      cell.tabIndex = -1;
      cell.setAttribute("role", "option");
      cell.setAttribute("aria-selected", "false");
      cell.setAttribute("aria-label", `${visible(text)}, ${origin}`);
      return cell;
    });
    tokens.replaceChildren(...cells);
    showExact(run);
    tokens.scrollTop = 0;
    const passes = new Set(example.tokens.map((t) => t[6]).filter((c) => c)).size;
    at("facts").textContent = `score ${example.score === null ? "–" : (100 * example.score).toFixed(1)} · ${cells.length} tokens in ${passes} cycles · `
      + `${counts.draft} draft, ${counts.judge} judge, ${counts.target} target`;
    current = 0;
    if (cells.length) go(0); else details.replaceChildren(make("p", "An empty answer."));
  };
  const examples = () => {
    const run = data.runs[Number(pick.rule.value)];
    const wanted = example && run.examples.findIndex((e) => e.id === example.id);
    fill(pick.example, run.examples.map((e, i) => [String(i), e.score === null ? e.id : `${e.id} (${(100 * e.score).toFixed(0)})`]), String(wanted));
    show();
  };
  const rules = () => {
    const before = pick.rule.selectedOptions[0]?.textContent;
    const mine = data.runs.map((run, i) => [String(i), run.name, run.group]).filter(([, , group]) => group === pick.task.value);
    fill(pick.rule, mine, mine.find(([, name]) => name === before)?.[0]);
    examples();
  };
  fill(pick.task, [...new Set(data.runs.map((run) => run.group))].map((group) => [group, group]));
  pick.task.addEventListener("change", rules);
  pick.rule.addEventListener("change", examples);
  pick.example.addEventListener("change", show);
  // a judged rule with a judged token comes first
  const has = (run) => run.examples.some((e) => e.tokens.some((t) => t[1] === "judge"));
  const first = data.runs.find((run) => run.name.startsWith("judged") && has(run)) ?? data.runs.find(has);
  if (first) pick.task.value = first.group;
  rules();
  if (first) { pick.rule.value = String(data.runs.indexOf(first)); examples(); }
  at("token-viewer").hidden = false;
})();
