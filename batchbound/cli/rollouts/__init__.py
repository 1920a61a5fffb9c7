"""Jobs of rollouts whose lengths nobody knows, on the command line."""
