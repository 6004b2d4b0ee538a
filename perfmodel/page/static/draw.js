// Elements: text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// Widths of the places of pictures: read once for all, since each reading lays out the page again.
const widths = {};

function measurePlaces() {
  for (const id of ["curve", "breakdown", "memory"]) widths[id] = byId(id).clientWidth;
}

// A picture as wide as its place, so that its text is never scaled.
function picture(place, height, label) {
  const width = Math.max(260, Math.round(widths[place.id]));
  const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  return { image, width };
}

function coloured(element, cause) {
  element.style.fill = `var(--${cause.replace(/[^a-z_]/g, "")}, var(--other))`;
  return element;
}

function key(cause, ...children) {
  const square = svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, coloured(svg("rect", { width: 10, height: 10, rx: 2 }), cause));
  return html("li", {}, square, ...children);
}

function table(headings, rows) {
  const cells = (tag, row) => html("tr", {}, ...row.map((cell) => html(tag, tag === "th" ? { scope: "col" } : {}, cell)));
  return html("table", {}, html("thead", {}, cells("th", headings)), html("tbody", {}, ...rows.map((row) => cells("td", row))));
}
