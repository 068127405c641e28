// One trajectory: what was said, with the policy's tokens coloured.
const MODES = { none: "none", logprob: "logprob", advantage: "advantage", gap: "trainer − sampler" };
const MOST_SHOWN = 3000; // tokens of a turn, and four times as many characters, before "show all"

class Detail {
  constructor(about, browser) {
    this.about = about;
    this.browser = browser;
    this.mode = "logprob";
    this.sent = false;
    this.node = h("div", { class: "detail" }, h("p", { class: "hint" }, about.index.step.length ? "Choose a trajectory." : "This run has no trajectories."));
    const sizes = about.index.advantage.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
    this.scale = sizes.length ? sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1 : 1;
  }

  refreshed() {
    if (this.position) this.place();
  }

  place() {
    const at = this.browser.rows.indexOf(this.i);
    this.position.textContent = at < 0 ? "" : `${number(at + 1)} of ${number(this.browser.rows.length)}`;
  }

  show(i, record) {
    this.i = i;
    this.record = record;
    this.flat(record);
    if (!this.modes().includes(this.mode)) this.mode = "logprob";
    this.position = h("span", { class: "count" });
    this.token = h("p", { class: "token", "aria-live": "polite" }, "Point at a token to see its numbers.");
    this.body = h("div", { class: "turns" });
    const button = (text, title, act) => h("button", { class: "plain", title, onclick: act }, text);
    fill(
      this.node,
      h(
        "div",
        { class: "controls" },
        h("div", { class: "bar" }, h("button", { class: "plain back", onclick: () => this.back() }, "‹ List"), button("↑", "The one before (k)", () => this.browser.move(-1)), button("↓", "The next (j)", () => this.browser.move(1)), this.position, this.colouring()),
        this.token,
      ),
      this.facts(),
      this.body,
    );
    this.place();
    this.paint();
    this.node.scrollTop = 0;
    requestAnimationFrame(() => setTimeout(() => performance.mark("shown"))); // for benchmarks/report.py
  }

  back() {
    this.browser.node.classList.remove("opened");
    history.replaceState(null, "", "#trajectories");
  }

  // Arrays over all of the policy's tokens, in thousandths.
  flat(record) {
    this.starts = [];
    let start = 0;
    for (const turn of record.turns) {
      this.starts.push(start);
      start += turn.t.length;
    }
    const per = (value) => (Array.isArray(value) ? (k) => value[k] : () => value);
    this.advantage = per(record.advantages);
    this.trainer = Array.isArray(record.trainer) ? (k) => record.trainer[k] : () => null;
  }

  values(turn, number) {
    const start = this.starts[number];
    const part = (value) => (value === null || value === undefined ? null : value / 1000);
    return (k) => {
      const logprob = part(turn.l[k]);
      const trainer = part(this.trainer(start + k));
      return { logprob, trainer, version: turn.v ? turn.v[k] : null, advantage: part(this.advantage(start + k)), gap: trainer === null || logprob === null ? null : trainer - logprob };
    };
  }

  modes() {
    return Object.keys(MODES).filter((mode) => (mode !== "advantage" || this.record.advantages !== null) && (mode !== "gap" || Array.isArray(this.record.trainer)));
  }

  colouring() {
    const choose = (mode) => {
      this.mode = mode;
      this.node.querySelector(".colouring").replaceWith(this.colouring());
      this.paint();
    };
    const buttons = this.modes().map((mode) => h("button", { "aria-pressed": String(mode === this.mode), onclick: () => choose(mode) }, MODES[mode]));
    const marks = legends[this.mode](this.scale).map(([shade, text]) => h("span", { class: `t ${shade}` }, text || " "));
    return h("div", { class: "colouring" }, h("span", { class: "segments", role: "group", "aria-label": "Colour by" }, buttons), h("span", { class: "legend" }, marks));
  }

  facts() {
    const { index, environments } = this.about;
    const { i, record } = this;
    const pairs = [
      ["reward", number(index.reward[i], 4)],
      ["advantage", index.advantage[i] === null ? null : number(index.advantage[i], 3)],
      ["right answer", record.tags.answer === undefined ? null : String(record.tags.answer)],
      ["ended", ending(this.about, i)],
      ["turns", number(index.turns[i])],
      ["tokens", number(index.tokens[i])],
      ["largest difference", index.gap[i] === null ? null : number(index.gap[i], 2)],
      ["policy version", record.newest > record.version ? `${number(record.version)} to ${number(record.newest)}` : number(record.version)],
      ["seed", record.seed === null ? null : String(record.seed)],
      ...Object.entries(record.tags).filter(([name]) => name !== "answer").map(([name, value]) => [name, String(value)]),
      ...Object.entries(record.metrics).map(([name, value]) => [name, number(value)]),
    ].filter(([, value]) => value !== null);
    const members = this.browser.members(i);
    const item = index.item[i] < 0 ? "" : `, item ${index.item[i]}`;
    const chip = (at) => h("button", { class: `chip ${this.browser.tone(index.reward[at])}${at === i ? " current" : ""}`, title: `member ${at - members[0]}`, onclick: () => this.browser.open(at) }, number(index.reward[at], 2));
    return h(
      "div",
      { class: "facts" },
      h("h2", {}, `Step ${index.step[i]} · ${environments[index.env[i]]}${item}`),
      h("dl", {}, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      members.length > 1 && h("p", { class: "members" }, h("span", {}, "Its group, by reward"), members.map(chip)),
    );
  }

  paint() {
    const { record } = this;
    const messages = this.sent ? [] : this.matched(record);
    const exact = h("label", { class: "exact" }, h("input", { type: "checkbox", checked: this.sent, onchange: (event) => { this.sent = event.target.checked; this.paint(); } }), "prompts as they were sent, token by token");
    const cards = messages.length ? messages : record.turns.flatMap((turn, k) => [this.prompt(turn), this.action(turn, k, null)]);
    fill(this.body, record.turns.length > 0 && record.messages.length > 0 && exact, cards, !cards.length && h("p", { class: "hint" }, "There were no turns: the first prompt did not fit."));
  }

  // Messages, the policy's own with their tokens; [] where they cannot be told apart.
  matched(record) {
    const own = record.messages.map((message, at) => [message, at]).filter(([message]) => message.role === "assistant").map(([, at]) => at);
    if (own.length < record.turns.length) return [];
    const turns = new Map(own.slice(own.length - record.turns.length).map((at, k) => [at, k]));
    return record.messages.map((message, at) => (turns.has(at) ? this.action(record.turns[turns.get(at)], turns.get(at), message) : this.message(message)));
  }

  card(kind, title, facts, ...body) {
    return h("article", { class: `turn ${kind}` }, h("h4", {}, title, h("span", {}, facts)), body);
  }

  message(message) {
    const role = message.role || "message";
    return this.card(role === "tool" ? "tool" : "context", role, message.name || "", this.long(message.content), this.calls(message));
  }

  prompt(turn) {
    const text = plain(turn.a, this.about.texts);
    return this.card("context", "prompt", turn.k ? `${plural(turn.a.length, "token")} behind ${number(turn.k)} kept` : plural(turn.a.length, "token"), this.long(text));
  }

  action(turn, k, message) {
    const facts = [plural(turn.t.length, "token"), turn.stop === "length" ? "cut at max_tokens" : null, turn.r === null ? "unscored" : `reward ${number(turn.r, 4)}`, turn.temperature === 1 ? null : `temperature ${number(turn.temperature)}`, ...Object.entries(turn.m).map(([name, value]) => `${name} ${number(value)}`)];
    return this.card(`policy${turn.stop === "length" ? " cut" : ""}`, `turn ${k + 1}`, facts.filter((fact) => fact).join(" · "), this.coloured(turn, k), message && this.calls(message));
  }

  coloured(turn, k) {
    const values = this.values(turn, k);
    const block = h("div", { class: "said" });
    const paint = (count) => {
      const shown = turn.t.slice(0, count);
      fill(block, spans(shown, this.about.texts, values, this.mode, this.scale, (...given) => this.tell(...given)), shown.length < turn.t.length && h("button", { class: "plain", onclick: () => paint(turn.t.length) }, `show all ${plural(turn.t.length, "token")}`), !turn.t.length && h("i", {}, "nothing"));
    };
    paint(MOST_SHOWN);
    return block;
  }

  tell(ids, text, values, node) {
    if (this.pointed) this.pointed.classList.remove("pointed");
    this.pointed = node;
    node.classList.add("pointed");
    const fact = (name, value) => h("span", {}, `${name} `, h("b", {}, value));
    fill(
      this.token,
      h("code", {}, JSON.stringify(text)),
      fact("id", ids.join(" ")),
      fact("p", values.logprob === null ? "–" : percent(Math.exp(values.logprob))),
      fact("logprob", number(values.logprob)),
      values.trainer !== null && fact("trainer", number(values.trainer)),
      values.gap !== null && fact("difference", number(values.gap)),
      values.advantage !== null && fact("advantage", number(values.advantage)),
      values.version !== null && fact("policy version", number(values.version)),
    );
  }

  long(text) {
    const block = h("div", { class: "said" });
    const paint = (count) => fill(block, text.slice(0, count), text.length > count && h("button", { class: "plain", onclick: () => paint(text.length) }, `show all ${plural(text.length, "character")}`), !text && h("i", {}, "nothing"));
    paint(4 * MOST_SHOWN);
    return block;
  }

  // The tool calls in a message: those it lists, or those in its text.
  calls(message) {
    const found = [];
    for (const call of message.calls || []) {
      const given = call.function || call;
      found.push([given.name, given.arguments]);
    }
    if (!found.length && message.role === "assistant") {
      for (const [, text] of message.content.matchAll(/<tool_call>\s*(\{[^]*?\})\s*<\/tool_call>/g)) {
        try {
          const call = JSON.parse(text);
          found.push([call.name, call.arguments ?? call.parameters]);
        } catch {
          found.push(["not JSON", text]);
        }
      }
      for (const [, name, text] of message.content.matchAll(/<function=([\w.-]+)>([^]*?)<\/function>/g)) found.push([name, text.trim()]);
    }
    const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "").replace(/\s*\n\s*/g, " ");
    return found.map(([name, given]) => h("p", { class: "call" }, h("b", {}, String(name)), h("code", {}, shown(given))));
  }
}
