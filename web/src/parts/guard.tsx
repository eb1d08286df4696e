// Keeps an error of one row or view from taking the rest of the page with it.
import { Component, type ReactNode } from "react";

interface Props {
  children: ReactNode;
  /** What is shown instead of children that cannot be rendered. */
  instead: ReactNode;
}

export class Guard extends Component<Props, { hasFailed: boolean }> {
  override state = { hasFailed: false };

  static getDerivedStateFromError = () => ({ hasFailed: true });

  override componentDidUpdate({ children }: Props) {
    // New values may be whole again.
    if (this.state.hasFailed && children !== this.props.children) {
      this.setState({ hasFailed: false });
    }
  }

  override render() {
    return this.state.hasFailed ? this.props.instead : this.props.children;
  }
}
