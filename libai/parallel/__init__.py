"""How a plain module is spread over processes: the mesh of ranks (plans and stages build on it)."""

from libai.parallel.mesh import Mesh as Mesh
