// What is wrong with the fields of a request. Pure.

/** Return a message about the first wrong field; empty if nothing is wrong. */
export function mistake(prompt, seed) {
  if (!prompt.trim()) return "Enter a text.";
  // Above it, numbers of JavaScript are not exact: another seed would be sent.
  const isSeed = /^[0-9]*$/.test(seed) && Number(seed) <= Number.MAX_SAFE_INTEGER;
  if (isSeed) return "";
  return `Seed: “${seed.slice(0, 32)}” is not an integer from 0 to ${Number.MAX_SAFE_INTEGER}.`;
}
