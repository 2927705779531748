// Where the state of an answer came from: the `hcache` object of every answer as a bar with its
// numbers, and as a timeline of layers where the server sends one.

const SOURCES = [
  ['resident', 'still in memory'],
  ['hidden', 'from hidden states'],
  ['kv', 'from saved KV'],
  ['recomputed', 'recomputed'],
  ['new', 'new'],
];
const METHODS = {H: 'hidden', KV: 'kv', RE: 'recomputed'};
const MAX_LANES = 128;

// A stacked bar. parts: [name, size] where name is also a colour's class.
function bar(parts, total) {
  const node = svg('svg', {class: 'bar', 'aria-hidden': 'true'});
  drawBar(node, parts, total);
  return node;
}

function drawBar(node, parts, total) {
  let x = 0;
  node.replaceChildren(...parts.filter(([, size]) => size > 0).map(([name, size]) => {
    const width = 100 * size / Math.max(total, 1e-9);
    const rect = svg('rect', {class: `c-${name}`, x: `${x}%`, width: `${width}%`, height: '100%'});
    x += width;
    return rect;
  }));
}

function legend(parts) {
  return el('ul', {class: 'legend'}, ...parts.map(([name, text]) =>
    el('li', {}, el('span', {class: `swatch c-${name}`, 'aria-hidden': 'true'}), text)));
}

function originParts(hcache) {
  return SOURCES.map(([name, text]) => [name, hcache.tokens?.[name] ?? 0, text])
    .filter(([, size]) => size > 0);
}

function originFacts({hcache, timings, usage}) {
  const facts = [];
  if (hcache.restore_ms > 0) facts.push(`restored in ${duration(hcache.restore_ms)}`);
  if (hcache.first_token_ms > 0) facts.push(`first token after ${duration(hcache.first_token_ms)}`);
  if (usage) facts.push(tokens(usage.completion_tokens));
  if (timings?.predicted_per_second > 0) {
    facts.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  }
  return facts.join(' · ');
}

function originTable({hcache, timings, usage}) {
  const rows = [['Schedule', hcache.schedule || 'nothing was restored']];
  if (hcache.restore_ms > 0) {
    rows.push(['Restored in', duration(hcache.restore_ms)]);
    rows.push(['Reading hidden behind computing', percent(hcache.overlap)]);
  }
  const read = Object.entries(hcache.bytes ?? {}).filter(([, n]) => n > 0);
  rows.push(['Read', read.map(([tier, n]) => `${bytes(n)} from ${tier}`).join(', ') || 'nothing']);
  rows.push(['Waited in the queue', duration(hcache.queue_ms ?? 0)]);
  if (timings) rows.push(['Prompt computed in', duration(timings.prompt_ms)]);
  if (usage) rows.push(['Context', tokens(usage.total_tokens)]);
  if (hcache.dropped_tokens > 0) rows.push(['Left the context', tokens(hcache.dropped_tokens)]);
  if (hcache.preemptions > 0) rows.push(['Made room for others', `${hcache.preemptions} times`]);
  return el('dl', {}, ...rows.flatMap(([name, value]) =>
    [el('dt', {}, name), el('dd', {}, value)]));
}

function lane(group, end) {
  const spans = [['io', group.io_ms, 0], ['compute', group.compute_ms, 6]]
    .filter(([, span]) => span?.length === 2);
  const draw = ([kind, [from, to], y]) => svg('rect', {
    class: kind === 'io' ? 'c-io' : `c-${METHODS[group.method] ?? 'new'}`,
    x: `${100 * from / end}%`, width: `${Math.max(100 * (to - from) / end, 0.3)}%`, y, height: 5,
  });
  const words = spans.map(([kind, [from, to]]) =>
    `${kind === 'io' ? 'read' : 'computed'} from ${from.toFixed(1)} to ${to.toFixed(1)} ms`);
  return el('tr', {},
    el('th', {scope: 'row'}, String(group.layers)),
    el('td', {}, group.method),
    el('td', {class: 'track'},
      svg('svg', {class: 'lane', 'aria-hidden': 'true'}, ...spans.map(draw)),
      el('span', {class: 'visually-hidden'}, words.join(', '))));
}

// One lane per group of layers: reading above, computing below.
function timeline(groups) {
  const end = Math.max(...groups.flatMap((g) => [g.io_ms?.[1] ?? 0, g.compute_ms?.[1] ?? 0]), 1e-9);
  const shown = groups.slice(0, MAX_LANES);
  const left = groups.length - shown.length;
  return el('table', {class: 'timeline'},
    el('caption', {}, `Restoring, layer by layer, over ${duration(end)}`
      + `${left > 0 ? `; ${left} more groups are not shown` : ''}`,
      legend([['io', 'reading'], ['hidden', 'H'], ['kv', 'KV'], ['recomputed', 'RE']])),
    el('thead', {}, el('tr', {}, el('th', {scope: 'col'}, 'Layers'), el('th', {scope: 'col'}, 'By'),
      el('th', {scope: 'col', class: 'track'}, 'When'))),
    el('tbody', {}, ...shown.map((group) => lane(group, end))));
}

// What stands under an answer. It takes the same room while the answer is written.
function originNode(message, status) {
  const {hcache} = message;
  if (!hcache) return el('div', {class: 'origin'}, bar([], 1), el('p', {}, status));
  const parts = originParts(hcache);
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  const details = el('details', {}, el('summary', {}, originFacts(message) || 'Details'),
    originTable(message));
  if (hcache.timeline?.length) details.append(timeline(hcache.timeline));
  return el('div', {class: 'origin'},
    bar(parts, total),
    legend(parts.map(([name, size, text]) => [name, `${number(size)} ${text}`])),
    details);
}
