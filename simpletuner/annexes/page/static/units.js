// Amounts as people read them.
export const gigabytes = (bytes) => (bytes < 5e7 ? `${Math.round(bytes / 1e5) / 10} MB` : `${(bytes / 1e9).toFixed(bytes < 1e10 ? 1 : 0)} GB`);

export function duration(seconds) {
  if (seconds < 90) return `${seconds.toPrecision(2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}
