// Which trajectories are listed, and in what order.
const ORDERS = {
  last: ["last step first", (x, i) => -x.step[i]],
  run: ["as in the run", (x, i) => i],
  best: ["highest reward", (x, i) => -(x.reward[i] ?? -Infinity)],
  worst: ["lowest reward", (x, i) => x.reward[i] ?? Infinity],
  long: ["most tokens", (x, i) => -x.tokens[i]],
  turns: ["most turns", (x, i) => -x.turns[i]],
  advantage: ["largest advantage", (x, i) => -Math.abs(x.advantage[i] ?? 0)],
  gap: ["largest sampler/trainer difference", (x, i) => -(x.gap[i] ?? -1)],
};

class Filters {
  constructor(about, changed) {
    this.index = about.index;
    this.changed = changed;
    const has = (name) => this.index[name].some((value) => value !== null);
    const choice = (label, options) => h("select", { "aria-label": label, onchange: changed }, options);
    const option = (value, text) => h("option", { value }, text);
    const bound = (label) => h("input", { type: "number", step: "any", placeholder: label, "aria-label": label, oninput: later(200, changed) });
    this.text = h("input", { type: "search", placeholder: "Search what was said", "aria-label": "Search what was said", oninput: later(250, changed) });
    this.env = choice("Environment", [option("", "all environments"), about.environments.map((name, i) => option(i, name))]);
    this.ended = choice("How it ended", [option("", "however ended"), about.endings.map((name, i) => option(i, name || "not said"))]);
    this.order = choice("Order", Object.entries(ORDERS).filter(([key]) => (key !== "advantage" && key !== "gap") || has(key)).map(([key, [text]]) => option(key, text)));
    this.steps = [bound("step ≥"), bound("step ≤")];
    this.rewards = [bound("reward ≥"), bound("reward ≤")];
    this.clear = h("button", { class: "plain", onclick: () => this.reset() }, "Clear");
    const several = (names) => names.length > 1;
    this.node = h(
      "div",
      { class: "filters" },
      this.text,
      several(about.environments) && this.env,
      several(about.endings) && this.ended,
      this.order,
      h("span", { class: "pair" }, this.steps),
      h("span", { class: "pair" }, this.rewards),
    );
  }

  reset() {
    for (const field of [this.text, ...this.steps, ...this.rewards]) field.value = "";
    this.env.value = this.ended.value = "";
    this.order.value = "last";
    this.changed();
  }

  get query() {
    return this.text.value.trim().toLowerCase();
  }

  // Positions in the index that the fields let through, in order; the text is not looked at.
  rows() {
    const x = this.index;
    const [low, high] = this.steps.map((field) => (field.value === "" ? null : Number(field.value)));
    const [least, most] = this.rewards.map((field) => (field.value === "" ? null : Number(field.value)));
    const env = this.env.value === "" ? null : Number(this.env.value);
    const ended = this.ended.value === "" ? null : Number(this.ended.value);
    const found = [];
    for (let i = 0; i < x.step.length; i++) {
      if (env !== null && x.env[i] !== env) continue;
      if (ended !== null && x.ended[i] !== ended) continue;
      if (low !== null && x.step[i] < low) continue;
      if (high !== null && x.step[i] > high) continue;
      if (least !== null && !(x.reward[i] !== null && x.reward[i] >= least)) continue;
      if (most !== null && !(x.reward[i] !== null && x.reward[i] <= most)) continue;
      found.push(i);
    }
    const [, key] = ORDERS[this.order.value] || ORDERS.last;
    if (this.order.value !== "run") found.sort((a, b) => key(x, a) - key(x, b) || a - b);
    return found;
  }
}
