// A small subset of Markdown, built from text nodes alone: nothing in it can become markup. Fenced
// code, lists, headings and paragraphs; `code` and **bold** inside them.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*(\S*)/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;

function takeCode(lines, i, fence) {
  const code = [];
  for (; i < lines.length; i++) {
    const end = lines[i].trim();
    if (end.length >= fence[1].length && end === fence[1][0].repeat(end.length)) break;
    code.push(lines[i]);
  }
  return [{kind: 'code', text: code.join('\n'), language: fence[2]}, i + 1];
}

// Items of one kind and depth that follow each other; indented lines belong to the item before.
function takeList(lines, i, first) {
  const kind = first[2] ? 'ol' : 'ul';
  const deep = first[1].length >= 2;
  const items = [];
  for (; i < lines.length; i++) {
    const item = ITEM.exec(lines[i]);
    if (item) {
      if ((item[2] ? 'ol' : 'ul') !== kind || (item[1].length >= 2) !== deep) break;
      items.push(item[3]);
    } else if (/^\s+\S/.test(lines[i]) && !FENCE.test(lines[i])) {
      items[items.length - 1] += `\n${lines[i].trim()}`;
    } else {
      break;
    }
  }
  return [{kind, deep, start: first[2], items}, i];
}

function takeParagraph(lines, i) {
  const text = [lines[i++]];
  for (; i < lines.length && lines[i].trim(); i++) {
    if (FENCE.test(lines[i]) || ITEM.test(lines[i]) || HEADING.test(lines[i])) break;
    text.push(lines[i]);
  }
  return [{kind: 'p', text: text.join('\n')}, i];
}

function markdownBlocks(text) {
  const lines = text.split('\n');
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const [fence, item, heading] = [FENCE.exec(line), ITEM.exec(line), HEADING.exec(line)];
    let block;
    if (!line.trim()) {
      i++;
      continue;
    } else if (fence) {
      [block, i] = takeCode(lines, i + 1, fence);
    } else if (item) {
      [block, i] = takeList(lines, i, item);
    } else if (heading) {
      [block, i] = [{kind: 'heading', text: heading[1]}, i + 1];
    } else {
      [block, i] = takeParagraph(lines, i);
    }
    blocks.push(block);
  }
  return blocks;
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*]+)\*\*/g)) {
    nodes.push(text.slice(end, match.index));
    nodes.push(match[1] === undefined ? el('strong', {}, match[2]) : el('code', {}, match[1]));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function blockNode(block) {
  switch (block.kind) {
    case 'code':
      return el('pre', {tabindex: 0, role: 'region', 'aria-label': `Code ${block.language}`.trim()},
        el('code', {}, block.text));
    case 'ol':
    case 'ul':
      return el(block.kind, {start: block.start, class: block.deep && 'deep'},
        ...block.items.map((item) => el('li', {}, ...inline(item))));
    case 'heading':
      return el('p', {class: 'heading'}, ...inline(block.text));
    default:
      return el('p', {}, ...inline(block.text));
  }
}

const blockSources = new WeakMap();

// Shows `text` in `node`. Blocks that have not changed stay the same elements.
function showMarkdown(node, text) {
  const blocks = markdownBlocks(text);
  blocks.forEach((block, i) => {
    const source = JSON.stringify(block);
    const old = node.children[i];
    if (old && blockSources.get(old) === source) return;
    const made = blockNode(block);
    blockSources.set(made, source);
    if (old) old.replaceWith(made);
    else node.append(made);
  });
  while (node.children.length > blocks.length) node.lastChild.remove();
}
