// The switch that shows equal facts, too. It is in the address.
import { useNavigate, useSearch } from "@tanstack/react-router";

export function AllSwitch() {
  const { all = false } = useSearch({ from: "/compare" });
  const navigate = useNavigate({ from: "/compare" });
  return (
    <div className="toolbar">
      <label>
        <input type="checkbox" checked={all} onChange={({ target: { checked } }) => void navigate({
          search: (old) => ({ ...old, all: checked || undefined }), replace: true,
          resetScroll: false })} />
        Show identical
      </label>
    </div>
  );
}
