// Tokens as coloured text. Classes, not colours, so that the theme decides what they look like.
const UNCLEAR = "\ufffd";
const LONGEST = 12;
const SPECIAL = /^(<\|[^|]*\|>|<\/?s>|<(pad|unk|bos|eos)>)$/;
const STEPS = {
  logprob: [0.05, 0.2, 0.5, 1, 2, 4, 7], // -logprob, in nats
  gap: [0.001, 0.01, 0.05, 0.2, 0.5],
};

// [{from, to, text}]: one per token, but for characters that took several.
const pieces = (tokens, texts) => {
  const found = [];
  for (let i = 0; i < tokens.length; ) {
    const text = texts[tokens[i]];
    if (text === undefined) found.push({ from: i, to: ++i, text: `⟨${tokens[i - 1]}⟩`, unknown: true });
    else if (!text.includes(UNCLEAR)) found.push({ from: i, to: ++i, text });
    else {
      let end = i;
      while (end < tokens.length && end - i < LONGEST && (texts[tokens[end]] || "").includes(UNCLEAR)) end++;
      const joint = texts[tokens.slice(i, end).join(",")];
      if (joint === undefined) end = i + 1;
      found.push({ from: i, to: end, text: joint === undefined ? text : joint });
      i = end;
    }
  }
  return found;
};

const plain = (tokens, texts) => pieces(tokens, texts).map((piece) => piece.text).join("");

const shade = {
  none: () => "",
  logprob: (values) => (values.logprob === null ? "" : `q${STEPS.logprob.filter((bound) => -values.logprob > bound).length}`),
  advantage: (values, scale) => {
    if (values.advantage === null || !values.advantage) return "";
    const level = Math.min(5, Math.max(1, Math.ceil((5 * Math.abs(values.advantage)) / scale)));
    return (values.advantage < 0 ? "n" : "p") + level;
  },
  gap: (values) => {
    if (values.gap === null) return "";
    const level = STEPS.gap.filter((bound) => Math.abs(values.gap) > bound).length;
    return level ? (values.gap < 0 ? "n" : "p") + level : "";
  },
};

const legends = {
  none: () => [],
  logprob: () => [["q0", "likely"], ...[1, 2, 3, 4, 5, 6].map((i) => [`q${i}`, ""]), ["q7", "unlikely"]],
  advantage: (scale) => [["n5", `−${number(scale)}`], ["n3", ""], ["n1", ""], ["p1", ""], ["p3", ""], ["p5", `+${number(scale)}`]],
  gap: () => [["n5", "trainer finds it less likely"], ["n3", ""], ["n1", ""], ["p1", ""], ["p3", ""], ["p5", "more likely"]],
};

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

// The spans of a turn's tokens; `values(i)` gives {logprob, advantage, trainer, gap} of token i.
const spans = (tokens, texts, values, mode, scale, show) =>
  pieces(tokens, texts).map((piece) => {
    const own = values(piece.from);
    const special = SPECIAL.test(piece.text);
    const node = h("span", { class: `t ${shade[mode](own, scale)}${special || piece.unknown ? " special" : ""}` }, visible(piece.text));
    const tell = () => show(tokens.slice(piece.from, piece.to), piece.text, own, node);
    node.addEventListener("pointerenter", tell);
    node.addEventListener("click", tell);
    return node;
  });
