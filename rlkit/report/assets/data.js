// Data stands in the page as base64 of gzip of JSON, and is unpacked when it is wanted.
const unpack = async (id) => {
  const node = byId(id);
  if (node === null) throw new Error(`the page has no ${id}`);
  const binary = atob(node.textContent.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

class Parts {
  constructor(kept = 24) {
    this.kept = kept;
    this.found = new Map(); // number -> promise, the least recently used first
  }

  get(number) {
    const promise = this.found.get(number) || unpack(`part-${number}`);
    this.found.delete(number);
    this.found.set(number, promise);
    if (this.found.size > this.kept) this.found.delete(this.found.keys().next().value);
    return promise;
  }
}
