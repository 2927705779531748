// Panels, keys, and the beginning.

const PANELS = [['chats-toggle', 'chats'], ['server-toggle', 'server']];

function setPanel(toggle, panel, open) {
  $(panel).classList.toggle('open', open);
  $(toggle).setAttribute('aria-expanded', String(open));
}

function closePanels() {
  for (const [toggle, panel] of PANELS) setPanel(toggle, panel, false);
}

for (const [toggle, panel] of PANELS) {
  $(toggle).addEventListener('click', () => {
    const open = !$(panel).classList.contains('open');
    closePanels();
    setPanel(toggle, panel, open);
    if (open) $(panel).querySelector('button')?.focus();
  });
}

document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || $('ask').open) return;
  const open = PANELS.find(([, panel]) => $(panel).classList.contains('open'));
  if (open) {
    closePanels();
    $(open[0]).focus();
  } else {
    stop();
  }
});

loadChats();
showChats();
showOptions();
showMessages();
scrollToEnd();
watch();
$('input').focus();
