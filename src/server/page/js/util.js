// Elements, lists and numbers.

const $ = (id) => document.getElementById(id);

// An element: attributes, "on…" listeners, children. Text is text, never markup.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) {
      node.addEventListener(name.slice(2), value);
    } else if (value !== false && value != null) {
      node.setAttribute(name, value === true ? '' : value);
    }
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Shows `text` in a node that is hidden while there is none.
function setNote(node, text) {
  setText(node, text ?? '');
  node.hidden = !text;
}

// Makes the children of `list` one per item, in order. Rows stay the same nodes from call to call,
// so focus and selection survive.
function syncList(list, items, keyOf, make, update) {
  const rows = new Map([...list.children].map((row) => [row.dataset.key, row]));
  const wanted = items.map((item) => {
    const key = String(keyOf(item));
    const row = rows.get(key) ?? make(item);
    row.dataset.key = key;
    rows.delete(key);
    update(row, item);
    return row;
  });
  for (const row of rows.values()) row.remove();
  wanted.forEach((row, i) => {
    if (list.children[i] !== row) list.insertBefore(row, list.children[i] ?? null);
  });
}

const numberFormat = new Intl.NumberFormat('en', {maximumFractionDigits: 0});
const number = (n) => numberFormat.format(n ?? 0);
const tokens = (n) => `${number(n)} ${n === 1 ? 'token' : 'tokens'}`;
const percent = (x) => `${Math.round(100 * x)} %`;

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  for (; n >= 1024 && i + 1 < units.length; i++) n /= 1024;
  return `${i === 0 || n >= 100 ? Math.round(n) : n.toPrecision(3)} ${units[i]}`;
}

function duration(ms) {
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

function age(seconds) {
  const units = [[86400, 'd'], [3600, 'h'], [60, 'min']];
  for (const [size, unit] of units) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return 'just now';
}

const sleep = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });
const randomId = () => [...crypto.getRandomValues(new Uint8Array(6))]
  .map((b) => b.toString(16).padStart(2, '0')).join('');

// Asks in a modal dialog. Without `value` a question: true or false; with it a text: the text, or
// null when it was cancelled.
function ask({title, text, yes, value}) {
  const dialog = $('ask');
  setText($('ask-title'), title);
  setText($('ask-text'), text);
  setText($('ask-yes'), yes);
  $('ask-field').hidden = value === undefined;
  $('ask-value').required = value !== undefined;
  $('ask-value').value = value ?? '';
  $('ask-yes').classList.toggle('danger', value === undefined);
  dialog.returnValue = '';
  dialog.showModal();
  (value === undefined ? $('ask-no') : $('ask-value')).focus();
  return new Promise((resolve) => {
    dialog.addEventListener('close', () => {
      const agreed = dialog.returnValue === 'yes';
      if (value === undefined) resolve(agreed);
      else resolve(agreed ? $('ask-value').value.trim() : null);
    }, {once: true});
  });
}
$('ask-no').addEventListener('click', () => $('ask').close());
