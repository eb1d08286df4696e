// The choice of a table's columns.
interface Props {
  /** Id and name of each column that may be hidden. */
  all: [id: string, name: string][];
  shown: string[];
  /** The columns of the usual choice. */
  usual: string[];
  set: (ids: string[] | undefined) => void;
}

export function Columns({ all, shown, usual, set }: Props) {
  const change = (id: string, isOn: boolean) => {
    const next = all.map(([one]) => one).filter((one) =>
      (one === id ? isOn : shown.includes(one)));
    set(next.join() === usual.join() ? undefined : next);
  };
  return (
    <details className="columns">
      <summary>Columns ({shown.length} of {all.length})</summary>
      <div className="toolbar">
        {all.map(([id, name]) => (
          <label key={id}>
            <input type="checkbox" checked={shown.includes(id)}
              onChange={({ target: { checked } }) => change(id, checked)} />
            {name}
          </label>
        ))}
        <button type="button" onClick={() => set(undefined)}>Usual columns</button>
      </div>
    </details>
  );
}
