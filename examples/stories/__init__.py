"""A source of stories, a metric, rewards and an environment: README.md."""
