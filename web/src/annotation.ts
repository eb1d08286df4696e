// What an edit of tags and a note changes. Pure functions.

export const NOTE_MAX = 4000;

export interface Annotated {
  tags: string[];
  note: string | null;
}

interface Change {
  add?: string[];
  remove?: string[];
  note?: string;
}

/** The tags in a text, separated by spaces or commas, each once. */
export const tagsIn = (text: string): string[] =>
  [...new Set(text.split(/[\s,]+/).filter(Boolean))];

/** The change from `before`, or null if there is none. Others may have changed the rest. */
export function changeOf(before: Annotated, tags: string[], note: string): Change | null {
  const add = tags.filter((one) => !before.tags.includes(one));
  const remove = before.tags.filter((one) => !tags.includes(one));
  const change = {
    ...(add.length > 0 ? { add } : {}),
    ...(remove.length > 0 ? { remove } : {}),
    ...(note.trim() === (before.note ?? "") ? {} : { note }),
  };
  return Object.keys(change).length > 0 ? change : null;
}
