"use strict";
// Elements are made here and nowhere else. Text goes in as text; there is no way from data to markup.
const h = (tag, given, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(given || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && typeof node[key] !== "object") node[key] = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
};
const byId = (id) => document.getElementById(id);
const fill = (node, ...children) => node.replaceChildren(...children.flat(9).filter((child) => child));

const number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(digits, 3) - 1);
  if (value === 0) return "0"; // -0, too
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000 && digits < 5) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
};
const percent = (value, digits = 3) => (value === null || value === undefined ? "–" : `${Number((100 * value).toPrecision(digits))} %`);
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : /(s|sh|ch|x)$/.test(word) ? "es" : word.endsWith("y") ? "" : "s"}`;
const duration = (time) => {
  const [seconds, minutes] = [Math.round(time), Math.round(time / 60)];
  if (time < 1) return "under a second";
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
};
const later = (wait, act) => {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), wait);
  };
};
