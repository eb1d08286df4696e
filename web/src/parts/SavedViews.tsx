// The saved views of the list of runs: save, open, rename and delete.
import { Dialog, DialogDismiss, DialogHeading, useDialogStore } from "@ariakit/react";
import { Link, useSearch } from "@tanstack/react-router";
import { useState } from "react";
import {
  changeViews, isSame, NAME_MAX, useSavedViews, viewOf, VIEWS_MAX, withoutView, withView,
  type SavedView,
} from "../savedViews";

const NOT_KEPT = "This browser does not keep views. Copy the address of the page instead.";

function NameForm({ label, word, initial = "", taken, save, back }: {
  label: string;
  word: string;
  initial?: string;
  /** The names that would be replaced. */
  taken: string[];
  save: (name: string) => void;
  back?: () => void;
}) {
  const [given, setGiven] = useState(initial);
  const name = given.trim();
  return (
    <form className="view-name" onSubmit={(event) => {
      event.preventDefault();
      save(name);
      setGiven("");
    }}>
      <label>
        {label}{" "}
        <input type="text" maxLength={NAME_MAX} required value={given} dir="auto"
          autoFocus={back !== undefined}
          onChange={(event) => setGiven(event.target.value)} />
      </label>
      <button type="submit" className="primary" disabled={!name}>
        {taken.includes(name) ? "Replace" : word}
      </button>
      {back ? <button type="button" onClick={back}>Back</button> : null}
    </form>
  );
}

function Row({ one, isCurrent, open, rename, remove }: {
  one: SavedView;
  isCurrent: boolean;
  open: () => void;
  rename: () => void;
  remove: () => void;
}) {
  return (
    <>
      <Link to="/" search={one.search} onClick={open} dir="auto" className="breaks"
        aria-current={isCurrent || undefined}>{one.name}</Link>
      <button type="button" onClick={rename} aria-label={`Rename ${one.name}`}>Rename</button>
      <button type="button" onClick={remove} aria-label={`Delete ${one.name}`}>Delete</button>
    </>
  );
}

export function SavedViews() {
  const given = useSearch({ from: "/" });
  const views = useSavedViews();
  const dialog = useDialogStore();
  const [renamed, setRenamed] = useState<string | null>(null);
  const [deleted, setDeleted] = useState<SavedView | null>(null);
  const [isRefused, setRefused] = useState(false);
  const current = views.find((one) => isSame(one.search, given));
  const names = views.map((one) => one.name);
  const change = (next: (old: SavedView[]) => SavedView[]) => setRefused(!changeViews(next));
  const show = () => {
    setRenamed(null);
    setDeleted(null);
    setRefused(false);
    dialog.show();
  };
  const isFull = views.length >= VIEWS_MAX;
  return (
    <>
      <button type="button" onClick={show} className="views">
        {current ? <>View: <span dir="auto">{current.name}</span></> : "Views"}
      </button>
      <Dialog store={dialog} className="dialog" backdrop={<div className="backdrop" />}
        unmountOnHide>
        <DialogHeading render={<h2 />}>Views</DialogHeading>
        {views.length === 0 ? (
          <p className="muted">
            A view is a name for the filters and the order in the address. To share one, send the
            address.
          </p>
        ) : (
          <ul className="view-list" aria-label="Saved views">
            {views.map((one) => (
              <li key={one.name}>
                {renamed === one.name ? (
                  <NameForm label={`New name of ${one.name}`} word="Rename" initial={one.name}
                    taken={names.filter((name) => name !== one.name)}
                    back={() => setRenamed(null)}
                    save={(name) => {
                      change((old) => withView(withoutView(old, one.name), { ...one, name }));
                      setRenamed(null);
                    }} />
                ) : (
                  <Row one={one} isCurrent={one === current} open={dialog.hide}
                    rename={() => setRenamed(one.name)}
                    remove={() => {
                      change((old) => withoutView(old, one.name));
                      setDeleted(one);
                    }} />
                )}
              </li>
            ))}
          </ul>
        )}
        <div role="status">
          {deleted ? (
            <p>
              Deleted <span dir="auto">{deleted.name}</span>.{" "}
              <button type="button" key={deleted.name} autoFocus onClick={() => {
                change((old) => withView(old, deleted));
                setDeleted(null);
              }}>Undo</button>
            </p>
          ) : null}
        </div>
        {isRefused ? <p role="alert">{NOT_KEPT}</p> : null}
        {isFull ? (
          <p className="muted">There are {VIEWS_MAX} views. Delete one to save another.</p>
        ) : (
          <NameForm label="Save the current filters as" word="Save" taken={names}
            save={(name) => change((old) => withView(old, { name, search: viewOf(given) }))} />
        )}
        <div className="choices"><DialogDismiss>Close</DialogDismiss></div>
      </Dialog>
    </>
  );
}
