"use strict";
// Texts of a run enter the page as text nodes and attributes only: nothing here makes markup from data.
const byId = (id) => document.getElementById(id);
const about = JSON.parse(byId("about").textContent);

// An element: make("p", { class: "quiet", onclick: act }, "text", another), without children that are null or false.
const make = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat(9).filter((child) => child ?? false));
  return node;
};

const isNumber = (value) => typeof value === "number";
const number = (value, digits = 3) => {
  if (!isNumber(value)) return String(value ?? "–");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 1);
  if (Number.isInteger(value)) return (value || 0).toLocaleString("en"); // no -0
  return size >= 1e3 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
};
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const known = (object) => Object.entries(object).filter(([, value]) => value !== null && value !== undefined);

// Data is kept as base64 of gzip of JSON.
const unpack = (id) => {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};

// ---- Curves ----
const several = about.runs.length > 1;
const curves = Object.values(about.charts).flatMap((chart) => chart.curves);
const environments = [...new Set(curves.map((curve) => curve.env))].filter(Boolean);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const smooth = (values, weight) => {
  let [mean, share] = [0, 0];
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share; // without the pull of the zero that it starts from
  });
};

// Room above and below. A curve that is flat but for rounding gets more: uPlot would make its ticks without end.
const range = (plot, low, high) => {
  if (low === null) return [0, 1];
  const flat = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
  const room = flat ? 0.1 * Math.abs(low) || 0.5 : 0.06 * (high - low);
  return [low - room, high + room];
};

// Ticks are round numbers, but for the last digits.
const labels = (plot, ticks) => ticks.map((tick) => String(Number(tick.toPrecision(9))));

const draw = (name, host) => {
  const chart = about.charts[name];
  const weight = Number(byId("smoothing").value);
  const [steps, ...columns] = uPlot.join(chart.curves.map(({ x, y }) => [x, y]));
  const values = columns.map((column) => (weight ? smooth(column, weight) : column));
  const series = chart.curves.map(({ env, end, run }, i) => {
    // Colours tell runs apart and dashes environments; in a page of one run colours tell environments apart.
    const place = Math.max(0, environments.indexOf(env));
    const stroke = css(`--series-${(several ? run : place) % 8}`);
    return {
      label: [env, several && about.runs[run], end].filter(Boolean).join(", ") || name,
      stroke,
      dash: end ? [2, 3] : several && place ? [8, 3 * place] : [],
      width: 1.75,
      spanGaps: true,
      points: { show: steps.length <= 60 && !weight, size: 5, fill: stroke },
      value: (plot, value, k, at) => number(at === null ? values[i].findLast(isNumber) : value),
    };
  });
  const grid = { stroke: css("--line"), width: 1 };
  const axis = { stroke: css("--quiet"), font: "11px system-ui, sans-serif", grid, ticks: { ...grid, size: 4 } };
  const width = (plot, texts) => Math.max(52, ...(texts ?? []).map((text) => 12 + 7 * text.length));
  const [first = 0] = steps;
  const spread = (plot, ...ends) => (steps.length > 1 ? ends : [first - 1, first + 1]);
  const whole = (plot, ticks) => labels(plot, ticks).map((label) => (label.includes(".") ? "" : label));
  const options = {
    width: host.clientWidth,
    height: 190,
    padding: [10, 8, 0, 0],
    series: [{}, ...series],
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    scales: { x: { time: false, range: spread }, y: { range } },
    axes: [{ ...axis, size: 26, values: whole }, { ...axis, size: width, values: labels }],
  };
  host.plot?.destroy();
  host.plot = new uPlot(options, [steps, ...values], host);
};

// Draw a chart when it comes into view, and again when the theme, its width or the smoothing has changed.
const showCurves = () => {
  const cards = [...document.querySelectorAll("[data-chart]")];
  const seen = new IntersectionObserver((entries) => {
    for (const { target } of entries.filter(({ isIntersecting }) => isIntersecting)) {
      seen.unobserve(target);
      draw(target.dataset.chart, target.querySelector(".plot"));
    }
  }, { rootMargin: "200px" });
  const redraw = () => {
    seen.disconnect();
    for (const each of cards) seen.observe(each); // which reports those in view
  };
  byId("find-metric").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const each of cards) each.hidden = !each.dataset.chart.toLowerCase().includes(wanted);
    byId("others")?.toggleAttribute("open", wanted !== "");
  });
  byId("smoothing").addEventListener("input", redraw);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
};

// ---- Tokens ----
const [UNCLEAR, LONGEST] = ["\ufffd", 12]; // text of a part of a character; tokens decoded together: as in page.py
const BOUNDS = { logprob: [0.05, 0.2, 0.5, 1, 2, 4, 7], gap: [0.001, 0.01, 0.05, 0.2, 0.5] }; // nats

// [{ from, to, text }]: one for each token, but for characters that took several.
const pieces = (tokens, texts) => {
  const found = [];
  for (let from = 0, to = 0; from < tokens.length; from = to) {
    for (to = from; to - from < LONGEST && texts[tokens[to]]?.includes(UNCLEAR); ) to++;
    if (to - from < 2 || !(tokens.slice(from, to).join(",") in texts)) to = from + 1;
    found.push({ from, to, text: texts[tokens.slice(from, to).join(",")] ?? `⟨${tokens[from]}⟩` });
  }
  return found;
};

// The class that colours a token: q0 to q7 by surprise, p1 to p5 above zero, n1 to n5 below.
const shade = (mode, value, scale) => {
  if (!isNumber(value)) return "";
  const passed = (bounds, size) => bounds.filter((bound) => size > bound).length;
  if (mode === "logprob") return `q${passed(BOUNDS.logprob, -value)}`;
  const size = Math.abs(value);
  const level = mode === "gap" ? passed(BOUNDS.gap, size) : Math.min(5, Math.ceil((5 * size) / scale));
  return level ? `${value < 0 ? "n" : "p"}${level}` : "";
};

// ---- Trajectories ----
const ROW = 82; // height of a row of the list, as in page.css
const ORDERS = {
  newest: (x, i) => -x.step[i],
  best: (x, i) => -(x.reward[i] ?? -Infinity),
  worst: (x, i) => x.reward[i] ?? Infinity,
  longest: (x, i) => -x.tokens[i],
  gap: (x, i) => -(x.gap[i] ?? -1),
};
const CHOICES = ["run", "env", "ended"];

const card = (kind, title, note, ...body) =>
  make("article", { class: `card ${kind}` }, make("h3", {}, title, make("span", { class: "quiet" }, ` ${note}`)), body);
const searchable = ({ messages }) =>
  messages.map(({ content, calls }) => `${content}\n${JSON.stringify(calls)}`).join("\n").toLowerCase();
const text = (content) => make("div", { class: "text" }, content);

const showCalls = (calls) => (Array.isArray(calls) ? calls : []).map((call) => {
  const { name, arguments: given } = call?.function ?? call ?? {};
  const shown = typeof given === "string" ? given : JSON.stringify(given);
  return make("p", { class: "call" }, make("b", {}, `${name} `), shown);
});
const showMessage = ({ role, name, content, calls }) =>
  card(role === "tool" ? "tool" : "context", role ?? "message", name ?? "", text(content), showCalls(calls));

class Browser {
  constructor(index) {
    this.index = index;
    this.x = index.columns; // name -> an entry for each trajectory
    this.words = {}; // part -> the searched text of each of its trajectories
    this.current = -1;
    const given = (name) => this.x[name].filter((value) => value !== null);
    this.rewards = [Math.min, Math.max].map((extreme) => given("reward").reduce((a, b) => extreme(a, b), 0));
    const sizes = given("advantage").map(Math.abs).sort((a, b) => a - b);
    this.scale = sizes[Math.floor(0.95 * sizes.length)] || 1; // of the colours of advantages
    for (const id of CHOICES) {
      const names = [...new Set(this.x[id])].sort();
      byId(id).append(...names.map((name) => make("option", { value: name }, name)));
      byId(id).hidden = names.length < 2;
    }
    for (const name of ["advantage", "gap"].filter((each) => !given(each).length)) {
      for (const option of document.querySelectorAll(`option[value=${name}]`)) option.remove();
    }
    this.listen();
    this.refresh();
  }

  listen() {
    const on = (id, kind, act) => byId(id).addEventListener(kind, act);
    for (const kind of ["input", "change"]) on("filters", kind, () => this.refresh());
    on("filters", "reset", () => setTimeout(() => this.refresh())); // after the fields are empty
    for (const id of ["mode", "sent"]) on(id, "change", () => this.detail());
    on("list", "scroll", () => this.paint());
    on("list", "keydown", (event) => {
      const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 10, PageUp: -10 }[event.key];
      if (by) event.preventDefault();
      if (by) this.move(by);
    });
    for (const [id, by] of Object.entries({ previous: -1, next: 1 })) on(id, "click", () => this.move(by));
    on("back", "click", () => byId("trajectories").classList.remove("opened"));
    const token = byId("token");
    on("opened", "pointerover", ({ target }) => (token.textContent = target.title || token.textContent));
    new ResizeObserver(() => this.paint()).observe(byId("list"));
  }

  // What the fields let through, in order; texts are not searched.
  filter() {
    const { x } = this;
    const chosen = CHOICES.map((id) => [x[id], byId(id).value]).filter(([, value]) => value !== "");
    const limits = [...document.querySelectorAll("[data-sign]")]
      .filter(({ value }) => value !== "")
      .map(({ value, dataset }) => [x[dataset.column], dataset.sign, value]);
    const fits = (i) =>
      chosen.every(([column, value]) => column[i] === value) &&
      limits.every(([column, sign, value]) => column[i] !== null && sign * (column[i] - value) >= 0);
    const key = ORDERS[byId("order").value];
    return [...x.step.keys()].filter(fits).sort((a, b) => key(x, a) - key(x, b) || a - b);
  }

  async refresh() {
    const turn = (this.turn = {}); // a later call takes over
    const query = byId("search").value.trim().toLowerCase();
    const rows = this.filter();
    const found = new Set();
    for (const [part, own] of query ? Map.groupBy(rows, (row) => this.x.part[row]) : []) {
      this.show(rows.filter((row) => found.has(row)), ", searching");
      this.words[part] ??= (await unpack(`part-${part}`)).map(searchable);
      if (turn !== this.turn) return;
      for (const row of own) if (this.words[part][this.x.place[row]].includes(query)) found.add(row);
    }
    this.show(query ? rows.filter((row) => found.has(row)) : rows, "");
  }

  show(rows, progress) {
    this.rows = rows;
    const part = rows.length < this.x.step.length ? `${number(rows.length)} of ` : "";
    byId("count").textContent = `${part}${number(this.x.step.length)} trajectories${progress}`;
    byId("rows").style.height = `${rows.length * ROW}px`;
    this.paint();
  }

  // Only the rows in view exist.
  paint() {
    const list = byId("list");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const last = Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 4;
    byId("rows").replaceChildren(...this.rows.slice(first, last).map((i, k) => this.row(i, first + k)));
  }

  row(i, at) {
    const { x } = this;
    const facts = [several && x.run[i], plural(x.turns[i], "turn"), plural(x.tokens[i], "token"), x.ended[i]];
    const node = make(
      "div",
      { class: "row", role: "option", "aria-selected": i === this.current, onclick: () => this.open(i) },
      make("div", {}, make("span", {}, make("b", {}, `step ${x.step[i]} `), this.name(i)), this.chip("span", i)),
      make("p", { class: "quiet" }, x.question[i] || "–"),
      make("p", {}, x.answer[i] || "–"),
      make("p", { class: "quiet" }, facts.filter(Boolean).join(" · ")),
    );
    node.style.transform = `translateY(${at * ROW}px)`;
    return node;
  }

  name(i) {
    return this.x.env[i] + (this.x.item[i] === null ? "" : ` · item ${this.x.item[i]}`);
  }

  chip(tag, i, attributes = {}) {
    const [low, high] = this.rewards;
    const reward = this.x.reward[i];
    const tone = ["poor", "", "good"][Math.floor((2.99 * ((reward ?? NaN) - low)) / (high - low))] ?? "";
    return make(tag, { class: `chip ${tone}`, ...attributes }, number(reward));
  }

  move(by) {
    const at = Math.max(0, this.rows.indexOf(this.current) + by);
    if (this.rows.length) this.open(this.rows[Math.min(at, this.rows.length - 1)]);
  }

  async open(i, { quiet = false } = {}) {
    this.current = i;
    const [list, at] = [byId("list"), this.rows.indexOf(i)];
    list.scrollTop = Math.min(at * ROW, Math.max(list.scrollTop, (at + 1) * ROW - list.clientHeight));
    this.paint();
    const records = await unpack(`part-${this.x.part[i]}`);
    if (this.current !== i) return;
    this.record = records[this.x.place[i]];
    this.detail();
    byId("detail").scrollTop = 0;
    byId("trajectories").classList.toggle("opened", !quiet);
    if (!quiet) history.replaceState(null, "", `#/trajectories/${i}`);
  }

  detail() {
    const { x, record, current: i } = this;
    const { answer, ...tags } = record.tags;
    const facts = [
      ...known({ reward: x.reward[i], advantage: x.advantage[i], "right answer": answer, ended: x.ended[i] }),
      ...known({ tokens: x.tokens[i], "largest gap": x.gap[i], "policy version": record.version }),
      ...known({ seed: record.seed?.toString(), ...tags }),
      ...known(record.metrics),
    ];
    const members = [...x.group.keys()].filter((k) => x.group[k] === x.group[i]);
    const chip = (k) => this.chip("button", k, { "aria-pressed": k === i, onclick: () => this.open(k) });
    const fact = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, number(value, 4)));
    const failure = (told) => make("p", { class: "warning" }, `An episode of the group failed: ${told}`);
    byId("detail").dataset.mode = byId("mode").value;
    byId("opened").replaceChildren(
      make("h2", {}, `Step ${x.step[i]} · ${this.name(i)}`),
      make("dl", {}, facts.map(fact)),
      make("p", { class: "bar quiet" }, "Its group, by reward", members.map(chip)),
      ...record.failures.map(failure),
      ...this.conversation(record),
    );
  }

  // Messages, the policy's with their tokens; on request, or where these do not fit the turns, prompts and answers.
  conversation({ messages, turns }) {
    const said = messages.filter((message) => message.role === "assistant");
    const own = said.slice(Math.max(0, said.length - turns.length));
    if (byId("sent").checked || own.length < turns.length) {
      return turns.flatMap((turn, k) => [this.showPrompt(turn), this.showTurn(k)]);
    }
    return messages.map((each) => (own.includes(each) ? this.showTurn(own.indexOf(each), each) : showMessage(each)));
  }

  showPrompt({ added, kept }) {
    const shown = pieces(added, this.index.texts).map((piece) => piece.text).join("");
    return card("context", "prompt", `${plural(added.length, "token")} after ${number(kept)} kept`, text(shown));
  }

  showTurn(k, message) {
    const { tokens, stop, reward, temperature, metrics } = this.record.turns[k];
    const numbers = known({ reward, temperature: temperature === 1 ? null : temperature, ...metrics });
    const note = [plural(tokens.length, "token"), ...numbers.map(([name, value]) => `${name} ${number(value, 4)}`)];
    if (stop === "length") note.push("cut at max_tokens");
    const body = [make("div", { class: "text tokens" }, this.spans(k))];
    if (message && !tokens.every((token) => token in this.index.texts)) body.unshift(text(message.content));
    return card("policy", `turn ${k + 1}`, note.join(" · "), body, message && showCalls(message.calls));
  }

  spans(k) {
    const { turns, advantages, trainer } = this.record;
    const { tokens, logprobs, versions } = turns[k];
    const start = turns.slice(0, k).reduce((sum, turn) => sum + turn.tokens.length, 0);
    const unit = (value) => (isNumber(value) ? value / 1000 : null);
    const mode = byId("mode").value;
    return pieces(tokens, this.index.texts).map(({ from, to, text: shown }) => {
      const [logprob, other] = [unit(logprobs[from]), unit(trainer?.[start + from])];
      const gap = logprob === null || other === null ? null : other - logprob;
      const advantage = unit(Array.isArray(advantages) ? advantages[start + from] : advantages);
      const values = { logprob, trainer: other, gap, advantage, "policy version": versions?.[from] };
      const numbers = known(values).map(([name, value]) => `${name} ${number(value)}`);
      const title = [JSON.stringify(shown), `id ${tokens.slice(from, to).join(" ")}`, ...numbers].join("   ");
      return make("span", { class: shade(mode, values[mode], this.scale), title }, shown.replaceAll("\n", "⏎\n"));
    });
  }
}

// ---- The page ----
const start = async () => {
  const index = await unpack("index");
  const { groups, total, unread } = index;
  const part = groups + unread < total ? `${number(groups)} groups, evenly spaced, of ` : "";
  byId("groups").textContent = ` · ${part}${plural(total, "group")}`;
  if (unread) byId("notice").textContent = `${plural(unread, "line")} of trajectories.jsonl cannot be read: left out`;
  const tabs = ["curves", "trajectories", "settings"];
  let browser = null;
  const route = () => {
    const [, name, item] = location.hash.split("/");
    const shown = tabs.find((tab) => tab === name) ?? "curves";
    for (const tab of tabs) {
      byId(tab).hidden = tab !== shown;
      byId(`tab-${tab}`).setAttribute("aria-selected", tab === shown);
    }
    document.body.dataset.tab = shown;
    if (shown !== "trajectories") return;
    browser ??= new Browser(index);
    if (item in index.columns.step) browser.open(Number(item));
    else if (browser.current < 0 && browser.rows.length) browser.open(browser.rows[0], { quiet: true });
  };
  for (const tab of tabs) byId(`tab-${tab}`).addEventListener("click", () => (location.hash = `/${tab}`));
  addEventListener("hashchange", route);
  showCurves();
  route();
  document.documentElement.dataset.ready = "yes";
};

start().catch((error) => {
  byId("notice").textContent = `The page could not be shown: ${error.message}`;
  document.documentElement.dataset.ready = "no";
});
