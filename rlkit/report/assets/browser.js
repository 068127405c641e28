// The list of trajectories: only the rows in view exist.
const ROW = 82;

// How it ended; "cut" where something that the policy said stopped at max_tokens.
const ending = (about, i) => `${about.endings[about.index.ended[i]] || "ended"}${about.index.cut[i] ? ", cut" : ""}`;

class Browser {
  constructor(about, host) {
    this.about = about;
    this.index = about.index;
    this.parts = new Parts();
    this.said = new Map(); // part -> what was said in each of its trajectories, in lower case
    this.rows = [];
    this.current = -1;
    this.turn = 0;
    this.filters = new Filters(about, () => this.refresh());
    this.count = h("p", { class: "count", role: "status" });
    this.space = h("div", { class: "space" });
    this.list = h("div", { class: "list", role: "listbox", tabIndex: 0, "aria-label": "Trajectories" }, this.space);
    this.detail = new Detail(about, this);
    this.node = h("div", { class: "browser" }, h("div", { class: "left" }, this.filters.node, h("div", { class: "bar under" }, this.count, this.filters.clear), this.list), this.detail.node);
    fill(host, this.node);
    this.list.addEventListener("scroll", () => this.paint());
    this.list.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.paint()).observe(this.list);
    this.refresh();
  }

  async refresh() {
    const turn = ++this.turn;
    const rows = this.filters.rows();
    const { query } = this.filters;
    if (!query) return this.show(rows, "");
    const wanted = new Map();
    for (const row of rows) {
      const part = this.index.part[row];
      if (!wanted.has(part)) wanted.set(part, new Set());
      wanted.get(part).add(row);
    }
    const found = new Set();
    let looked = 0;
    for (const [part, own] of wanted) {
      const said = await this.text(part);
      if (turn !== this.turn) return undefined;
      for (const row of own) if (said[this.index.place[row]].includes(query)) found.add(row);
      looked += own.size;
      if (looked < rows.length) this.show(rows.filter((row) => found.has(row)), `, ${number(looked)} of ${number(rows.length)} searched`);
    }
    return this.show(rows.filter((row) => found.has(row)), "");
  }

  async text(part) {
    if (!this.said.has(part)) {
      const records = await this.parts.get(part);
      this.said.set(part, records.map((record) => this.words(record)));
    }
    return this.said.get(part);
  }

  words(record) {
    const said = record.messages.map((message) => `${message.content}\n${message.calls ? JSON.stringify(message.calls) : ""}`);
    if (!said.length) for (const turn of record.turns) said.push(plain(turn.a, this.about.texts), plain(turn.t, this.about.texts));
    return said.join("\n").toLowerCase();
  }

  show(rows, progress) {
    this.rows = rows;
    const all = this.index.step.length;
    const missing = this.about.total - all;
    const left = missing > 0 ? ` (the run has ${number(this.about.total)}; these are spread evenly over it)` : "";
    fill(this.count, `${rows.length === all ? number(all) : `${number(rows.length)} of ${number(all)}`} trajectories${left}${progress}`);
    this.space.style.height = `${rows.length * ROW}px`;
    const at = rows.indexOf(this.current);
    if (at < 0) this.list.scrollTop = 0;
    this.paint();
    this.detail.refreshed();
    return undefined;
  }

  paint() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
    const last = Math.min(this.rows.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / ROW) + 4);
    const nodes = [];
    for (let at = first; at < last; at++) nodes.push(this.row(at));
    fill(this.space, nodes);
  }

  row(at) {
    const x = this.index;
    const i = this.rows[at];
    const item = x.item[i] < 0 ? "" : ` · item ${x.item[i]}`;
    const facts = `${plural(x.turns[i], "turn")} · ${plural(x.tokens[i], "token")} · ${ending(this.about, i)}`;
    const node = h(
      "div",
      { class: `row${i === this.current ? " current" : ""}`, role: "option", "aria-selected": String(i === this.current), onclick: () => this.open(i) },
      h("div", { class: "one" }, h("b", {}, `step ${x.step[i]}`), h("span", { class: "name" }, `${this.about.environments[x.env[i]]}${item}`), h("span", { class: `reward ${this.tone(x.reward[i])}` }, number(x.reward[i]))),
      h("div", { class: "asked" }, x.question[i] || "—"),
      h("div", { class: "two" }, x.snippet[i] || "—"),
      h("div", { class: "three" }, facts),
    );
    node.style.transform = `translateY(${at * ROW}px)`;
    return node;
  }

  tone(reward) {
    if (reward === null) return "unscored";
    if (this.middle === undefined) {
      const known = this.index.reward.filter((value) => value !== null);
      let [low, high] = [Infinity, -Infinity];
      for (const value of known) [low, high] = [Math.min(low, value), Math.max(high, value)];
      this.middle = [low, high];
    }
    const [low, high] = this.middle;
    if (low === high) return "mid";
    const share = (reward - low) / (high - low);
    return share > 0.66 ? "high" : share < 0.34 ? "low" : "mid";
  }

  key(event) {
    const by = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (by === undefined || !this.rows.length) return;
    event.preventDefault();
    this.move(by);
  }

  move(by) {
    const at = this.rows.indexOf(this.current);
    const to = Math.min(this.rows.length - 1, Math.max(0, at < 0 ? 0 : at + by));
    if (this.rows.length) this.open(this.rows[to]);
  }

  async open(i, { quiet = false } = {}) {
    this.current = i;
    const at = this.rows.indexOf(i);
    if (at >= 0) {
      const top = at * ROW;
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      else if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    }
    this.paint();
    const records = await this.parts.get(this.index.part[i]);
    if (this.current !== i) return;
    this.detail.show(i, records[this.index.place[i]]);
    if (!quiet) {
      this.node.classList.add("opened");
      if (location.hash !== `#trajectories/${i}`) history.replaceState(null, "", `#trajectories/${i}`);
    }
  }

  // The members of a trajectory's group, which stand next to each other in the index.
  members(i) {
    const { group } = this.index;
    let first = i;
    while (first > 0 && group[first - 1] === group[i]) first--;
    const found = [];
    for (let at = first; at < group.length && group[at] === group[i]; at++) found.push(at);
    return found;
  }
}
