// Numbers for people.

// 12_345_678_901 -> "12.3 GB": powers of ten, as the rest of mlxmoe writes them.
export function bytes(count) {
  for (const [unit, name] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(count) >= unit) return `${(count / unit).toFixed(1)} ${name}`;
  }
  return `${count} bytes`;
}

export const whole = (count) => count.toLocaleString("en-US");
export const percent = (share) => `${(share * 100).toFixed(1)} %`;
export const several = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

export function rate(perSecond) {
  return perSecond >= 100 ? perSecond.toFixed(0) : perSecond.toFixed(1);
}

export function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} days`;
}
