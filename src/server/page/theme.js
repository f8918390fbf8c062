// Colours: the system's, or the reader's choice. Runs before anything is drawn.
'use strict';
const theme = {
  names: ['auto', 'light', 'dark'],
  choice() {
    try {
      return localStorage.getItem('beryl-theme') || 'auto';
    } catch {
      return 'auto';    // a browser that keeps nothing
    }
  },
  show() {
    const dark = this.choice() === 'dark' || (this.choice() === 'auto' && matchMedia('(prefers-color-scheme: dark)').matches);
    document.documentElement.dataset.theme = dark ? 'dark' : 'light';
  },
  next() {
    const name = this.names[(this.names.indexOf(this.choice()) + 1) % this.names.length];
    try {
      localStorage.setItem('beryl-theme', name);
    } catch { /* then it holds until the reload that nobody asked for */ }
    this.show();
    return name;
  },
};
theme.show();
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => theme.show());
