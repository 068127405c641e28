// Puts the page together.
const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const TABS = ["curves", "trajectories", "counters", "settings"];

const tiles = (about) => {
  const find = (title) => about.panels.find((panel) => panel.title === title);
  const found = [["steps", number(about.steps)], ["time", duration(about.seconds)]];
  for (const [title, format] of [["Reward", number], ["Evaluation", number], ["KL, sampler to trainer", number], ["Cut at max_tokens", percent], ["Truncated", percent]]) {
    const panel = find(title);
    const curve = panel && (panel.curves.find((each) => each.name.includes("kl_k3") || each.name === "eval/mean") || panel.curves[0]);
    if (!curve || !curve.y.length) continue;
    const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
    const size = Math.max(1, Math.floor(curve.y.length / 10)); // the first and the last tenth of the run
    const over = ["Reward", "Cut at max_tokens", "Truncated"].includes(title) ? panel.curves.filter((each) => each.y.length) : [curve]; // environments
    const [then, now] = [mean(over.map((each) => mean(each.y.slice(0, size)))), mean(over.map((each) => mean(each.y.slice(-size))))];
    if ({ "KL, sampler to trainer": 1e-4, Truncated: 1e-9 }[title] > Math.max(Math.abs(then), Math.abs(now))) continue; // says nothing
    found.push([title === "KL, sampler to trainer" ? "KL to the trainer" : title.toLowerCase(), format(now), curve.y.length > 1 ? `from ${format(then)}` : ""]);
  }
  const sum = (counter) => Object.entries(about.counters).filter(([env]) => env.startsWith("env/")).reduce((total, [, counts]) => total + (counts[counter] || 0), 0);
  if (sum("episodes")) found.push(["episodes", number(sum("episodes")), sum("failed") ? `${number(sum("failed"))} failed` : "none failed"]);
  return found.map(([name, value, note]) => h("div", { class: "tile" }, h("span", {}, name), h("b", {}, value), h("i", {}, note || " ")));
};

const countersTable = (about) => {
  const entries = Object.entries(about.counters);
  if (!entries.length) return h("p", { class: "hint" }, "This run counted nothing.");
  const bad = (name) => /^(failed|timed_out|truncated|cut|empty|retried|refilled|abandoned|dropped|close_failed|errors|refused|mixed)/.test(name);
  return entries.map(([env, counts]) =>
    h("article", { class: "card counters" }, h("h3", {}, env.replace(/^env\//, ""), h("span", {}, env.startsWith("env/") ? "environment; counts and extremes over the run, means as of the last step" : "counts and extremes over the run, means as of the last step")),
      h("dl", {}, Object.entries(counts).map(([name, value]) => h("div", { class: bad(name) && value ? "marked" : "" }, h("dt", {}, name), h("dd", {}, number(value)))))));
};

const benchmarksTable = (rows) => {
  const cell = (row) => [row.step, row.harness, row.task, row.metric, number(row.value) + (row.stderr === null ? "" : ` ± ${number(row.stderr)}`), row.samples === null ? "" : number(row.samples)];
  const names = ["step", "harness", "task", "metric", "score ± standard error", "samples"];
  return rows.length > 0 && h("article", { class: "card" }, h("h3", {}, "Benchmarks"),
    h("table", { class: "benchmarks" }, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, cell(row).map((text) => h("td", {}, `${text}`)))))));
};

const flat = (value, path = []) => {
  if (value !== null && typeof value === "object" && Object.keys(value).length) return Object.entries(value).flatMap(([key, each]) => flat(each, [...path, key]));
  return [[path.join("."), value]];
};

const settingsTable = (about) => {
  const listed = (given) => {
    const rows = flat(given).filter(([path]) => path);
    return rows.length && h("table", { class: "settings" }, h("tbody", {}, rows.map(([path, value]) => h("tr", {}, h("th", { scope: "row" }, path), h("td", {}, typeof value === "string" ? value : JSON.stringify(value))))));
  };
  return [listed(about.config),
    Object.keys(about.settings).length > 0 && h("h2", { class: "part" }, "What it trained"), listed(about.settings),
    !Object.keys({ ...about.config, ...about.settings }).length && h("p", { class: "hint" }, "This run kept no settings (config.json, run.json)."),
    Object.keys(about.surroundings).length > 0 && h("h2", { class: "part" }, "What it ran on"), listed(about.surroundings), h("p", { class: "hint" }, `Written by rlkit ${about.rlkit}. Keys and passwords are left out.`)];
};

const themed = (gallery) => {
  const button = byId("theme");
  let theme = "auto";
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = THEMES[theme];
    button.setAttribute("aria-label", `Theme: ${theme}`);
    gallery.redraw();
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
};

// What differs from zero, or from one, by less than single precision holds is as good as that.
const levelOf = (panel) => {
  const value = panel.curves[0].y[0];
  return panel.same === 0 && value !== 0 && Math.abs(value) < 1e-6 ? "under 1e-6" : (unitOf[panel.unit] || number)(value);
};

const curvesPart = (about, gallery) => {
  fill(byId("tiles"), tiles(about));
  fill(byId("benchmarks"), benchmarksTable(about.benchmarks));
  const known = about.panels.filter((panel) => panel.standard);
  const [standard, level] = [known.filter((panel) => !panel.flat), known.filter((panel) => panel.flat)];
  const others = about.panels.filter((panel) => !panel.standard);
  for (const panel of standard) gallery.add(panel, byId("standard"));
  for (const panel of level) gallery.add(panel, byId("level-grid"));
  byId("level").hidden = !level.length;
  byId("level-names").textContent = level.map((panel) => `${panel.title.toLowerCase()} ${levelOf(panel)}`).join(" · ");
  if (!known.length && !others.length) fill(byId("standard"), h("p", { class: "hint" }, "This run has no metrics."));
  byId("others").hidden = !others.length;
  byId("others").open = !known.length;
  byId("others-count").textContent = String(others.length);
  const cards = others.map((panel) => gallery.add(panel, byId("others-grid")).node);
  byId("others-search").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    cards.forEach((card, i) => (card.hidden = !others[i].title.toLowerCase().includes(wanted)));
  });
  byId("smoothing").addEventListener("input", later(30, (event) => {
    const weight = Number(event.target.value);
    byId("smoothed").textContent = weight ? weight.toFixed(2) : "off";
    gallery.redraw(weight);
  }));
};

const start = async () => {
  const about = await unpack("about");
  const gallery = new Gallery();
  const episodes = about.index.step.length;
  byId("summary").textContent = [plural(about.steps, "step"), episodes ? `${number(about.total)} trajectories` : "", about.environments.slice(0, 4).join(", "), about.seconds ? duration(about.seconds) : ""].filter((x) => x).join(" · ");
  if (about.unread) {
    byId("trouble").hidden = false;
    byId("trouble").textContent = `${plural(about.unread, "line")} of trajectories.jsonl could not be read, and ${about.unread === 1 ? "is" : "are"} left out.`;
  }
  curvesPart(about, gallery);
  fill(byId("counters"), countersTable(about));
  fill(byId("settings"), settingsTable(about));
  themed(gallery);
  let browser = null;
  const show = (name, item) => {
    for (const tab of TABS) {
      byId(tab).hidden = tab !== name;
      byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
      byId(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
    }
    document.body.dataset.tab = name;
    if (name !== "trajectories") return;
    browser = browser || new Browser(about, byId("trajectories"));
    const wide = matchMedia("(min-width: 900px)").matches;
    if (item !== undefined && item < episodes) browser.open(item);
    else if (wide && browser.current < 0 && episodes) browser.open(browser.rows[0] ?? 0, { quiet: true });
    else browser.paint();
  };
  const route = () => {
    const [name, item] = location.hash.slice(1).split("/");
    show(TABS.includes(name) ? name : "curves", /^\d+$/.test(item || "") ? Number(item) : undefined);
  };
  for (const tab of TABS) {
    byId(`tab-${tab}`).addEventListener("click", () => {
      history.replaceState(null, "", `#${tab}`);
      show(tab);
    });
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = TABS[(TABS.indexOf(tab) + by + TABS.length) % TABS.length];
      byId(`tab-${next}`).focus();
      byId(`tab-${next}`).click();
    });
  }
  addEventListener("hashchange", route);
  route();
  document.documentElement.dataset.ready = "yes";
};

start().catch((error) => {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `The page could not be shown: ${error.message}`;
  document.documentElement.dataset.ready = "no";
});
