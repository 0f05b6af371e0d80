#!/usr/bin/env python3
"""What dev/simt/rewrite.py makes of CUDA source, what it refuses, and what the headers refuse to compile."""
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rewrite import Refused, rewrite

LAUNCH = '[=](auto... simt_arguments) { %s(simt_arguments...); }'
REWRITTEN = [  # name, source, what its lines become
    ("two settings", 'k<<<grid, 64>>>(a, b);', f'simt_launch("k", grid, 64,0,0, {LAUNCH % "k"},a, b);'),
    ("four settings", 'k<<<g, b, n, s>>>();', f'simt_launch("k", g, b, n, s, {LAUNCH % "k"});'),
    ("template arguments", 'k<X, W<2>><<<f(1, 2), dim3(3, 4)>>>(a);', f'simt_launch("k", f(1, 2), dim3(3, 4),0,0, {LAUNCH % "k<X, W<2>>"},a);'),
    ("a namespace", 'ops::k<<<1, 2>>>(a);', f'simt_launch("ops::k", 1, 2,0,0, {LAUNCH % "ops::k"},a);'),
    ("NULL as a pointer", 'k<<<1, 2>>>(NULL, a);', f'simt_launch("k", 1, 2,0,0, {LAUNCH % "k"},nullptr, a);'),
    ("comments and strings", '// k<<<1>>>(a);\nf("<<<"); /* __shared__ */', '// k<<<1>>>(a);\nf("<<<"); /* __shared__ */'),
    ("lines stay", 'k<<<1,\n2>>>(a,\nb);\nint n;', f'simt_launch("k", 1,\n2,0,0, {LAUNCH % "k"},a,\nb);\nint n;'),
    ("dynamic shared memory", 'extern __shared__ __align__(16) float tile[];', 'auto* tile = simt_dynamic_shared<float>();'),
    ("static shared memory", '__shared__ float tile[32][33];',
     'static char simt_tile; auto& tile = simt_shared<float[32][33]>(&simt_tile, "tile");'),
    ("one variable", '__shared__ unsigned int n;', 'static char simt_n; auto& n = simt_shared<unsigned int>(&simt_n, "n");'),
    ("two arrays of a template", '__shared__ Pack<X, 4> a[2];', 'static char simt_a; auto& a = simt_shared<Pack<X, 4>[2]>(&simt_a, "a");'),
]
REFUSED = [  # name, source, line, text of the reason
    ("one setting", '\nk<<<1>>>(a);', 2, "1 launch arguments"),
    ("a launch inside an expression", 'x = (k<<<1, 2>>>(a), 3);', 1, "a statement of its own"),
    ("a pointer to a kernel", '(*table[i])<<<1, 2>>>(a);', 1, "not a plain name"),
    ("an unclosed launch", 'k<<<1, 2>(a);\n', 1, "without its >>>"),
    ("no arguments", 'k<<<1, 2>>>;', 1, "no ( after >>>"),
    ("an initial value", '__shared__ int n = 3;', 1, "no initial value"),
    ("dynamic memory with a size", 'extern __shared__ float x[3];', 1, "expected `extern __shared__ type name[];`"),
    ("a pointer declarator", '__shared__ float a[2], *b;', 1, "names with dimensions"),
    ("a __device__ variable", '\n\n__device__ int counter;', 3, "not restored"),
]
COMPILED = [  # name, lines of a kernel, part of the compiler's message or None
    ("integer atomics", '__shared__ unsigned n; atomicAdd(&n, 1); __syncthreads();', None),
    ("float atomics", '__shared__ float x; atomicAdd(&x, 1.0f);', "a sum of floats depends on its order"),
    ("__activemask", '__syncwarp(__activemask());', "pass the mask that the code implies"),
]


def refused(source):
    try:
        return None, rewrite(source, 'x.cu')
    except Refused as r:
        return source.count('\n', 0, r.args[0]) + 1, r.args[1]


def compiled(body):
    source = '#include <cuda_runtime.h>\n__global__ void k(int* out) { ' + body + ' out[0] = 1; }\nvoid f(int* p) { k<<<1, 32>>>(p); }\n'
    with tempfile.NamedTemporaryFile('w', suffix='.cu') as file:
        file.write(rewrite(source, 'x.cu'))
        file.flush()
        flags = ['-x', 'c++', '-std=gnu++17', '-D_GNU_SOURCE', '-D__CUDACC__', '-DSIMT', '-fsyntax-only']
        return subprocess.run(['g++', *flags, '-I', str(Path(__file__).parent / 'include'), file.name], capture_output=True, text=True)


def main():
    n_passed = n_failed = 0

    def check(ok, name, found):
        nonlocal n_passed, n_failed
        n_passed, n_failed = n_passed + bool(ok), n_failed + (not ok)
        if not ok:
            print(f"FAIL  {name}: found {found}")

    for name, source, want in REWRITTEN:
        line, found = refused(source)
        check(found == f'#line 1 "x.cu"\n{want}' and line is None, name, found)
    for name, source, want_line, want in REFUSED:
        line, found = refused(source)
        check(line == want_line and want in found, name, f"line {line}: {found}")
    for name, body, want in COMPILED:
        result = compiled(body)
        check((result.returncode == 0) if want is None else (result.returncode != 0 and want in result.stderr), name, result.stderr[:500])
    print(f"{n_passed} passed, {n_failed} failed")
    return n_failed > 0


if __name__ == '__main__':
    sys.exit(main())
