"""The launcher, and the process of a rank: what `import oneflow` needs, how it stops and how it ends."""
