#!/usr/bin/env python3
"""
Rewrites CUDA source for a C++ compiler: what dev/simt/include cannot give by headers alone.

    dev/simt/rewrite.py OUT FILE...      writes OUT/FILE for every FILE

    kernel<T><<<grid, block, shared, stream>>>(a, b);   simt_launch("kernel", grid, block, shared, stream, [=](auto... simt_arguments) {
                                                            kernel<T>(simt_arguments...); }, a, b);
    extern __shared__ float tile[];                     auto* tile = simt_dynamic_shared<float>();
    __shared__ float tile[32][33];                      static char simt_tile; auto& tile = simt_shared<float[32][33]>(&simt_tile, "tile");

Lines stay where they are, and a #line names the original file, so that messages, sanitizers and debuggers do too.
A form that is not understood ends the build with file and line: nothing is passed on half rewritten.
"""
import re
import sys
from pathlib import Path


class Refused(Exception):
    """(position in the text, what is wrong)"""


def blank_out(text):
    """The text with comments, strings and character constants replaced by blanks: positions stay, brackets can be counted."""
    pattern = re.compile(r'//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
    return pattern.sub(lambda m: re.sub(r'[^\n]', ' ', m.group()), text)


def closing(code, start, opening, end):
    """Position after the bracket that closes the one at start."""
    depth = 0
    for i in range(start, len(code)):
        depth += (code[i] == opening) - (code[i] == end)
        if depth == 0:
            return i + 1
    raise Refused(start, f"'{opening}' is never closed")


def split_commas(code, start, end):
    """Ranges between the commas of code[start:end] that are in no bracket. < > count only where they hold template arguments."""
    ranges, depth, at = [], 0, start
    for i in range(start, end):
        depth += (code[i] in '([{') - (code[i] in ')]}')
        if code[i] == ',' and depth == 0:
            ranges.append((at, i))
            at = i + 1
    return ranges + [(at, end)] if code[at:end].strip() or ranges else []


def kernel_start(code, end):
    """Where the kernel's name before code[end] = '<<<' begins, and where its template arguments do (or end, without any)."""
    i = end
    while code[i - 1].isspace():
        i -= 1
    arguments = i
    if code[i - 1] == '>':
        depth = 0
        while i > 0:
            i -= 1
            depth += (code[i] == '>') - (code[i] == '<')
            if depth == 0:
                break
        arguments = i
    name = re.search(r'[A-Za-z_][\w:]*\s*$', code[:i])
    if not name:
        raise Refused(end, "the kernel before <<< is not a plain name, with template arguments or without")
    return name.start(), arguments


def rewrite_launch(text, code, at):
    """(start, end, replacement) of the launch whose <<< is at `at`."""
    start, arguments = kernel_start(code, at)
    depth, close = 0, at + 3
    while depth or code[close:close + 3] != '>>>':
        depth += (code[close] in '([{') - (code[close] in ')]}')
        close += 1
        if close >= len(code) or depth < 0 or code[close] == ';':
            raise Refused(at, "<<< without its >>>")
    settings = [text[a:b] for a, b in split_commas(code, at + 3, close)]
    if not 2 <= len(settings) <= 4:
        raise Refused(at, f"{len(settings)} launch arguments; put the grid, block, shared bytes and stream, 2 to 4 of them, between commas")
    settings += ['0'] * (4 - len(settings))
    paren = re.compile(r'\s*\(').match(code, close + 3)
    if not paren:
        raise Refused(at, "no ( after >>>")
    end = closing(code, paren.end() - 1, '(', ')')
    given = [text[a:b] for a, b in split_commas(code, paren.end(), end - 1)]
    given = ['nullptr' if g.strip() == 'NULL' else g for g in given]
    name = text[start:arguments].strip()
    call = f'simt_launch("{name}", {",".join(settings)}, [=](auto... simt_arguments) {{ {text[start:at].strip()}(simt_arguments...); }}'
    replacement = call + ''.join(',' + g for g in given) + ')'
    if not re.compile(r'\s*;').match(code, end):
        raise Refused(at, "a launch must be a statement of its own, ended by ;")
    return start, end, replacement


def rewrite_shared(text, code, at):
    """(start, end, replacement) of the declaration of shared memory whose __shared__ is at `at`."""
    end = code.find(';', at)
    start = re.search(r'(extern\s+|static\s+)?$', code[:at]).start()
    declaration = code[at + len('__shared__'):end]
    if end < 0 or re.search(r'[={}]', declaration):
        raise Refused(at, "shared memory has no initial value: expected `__shared__ type name[n];`")
    declaration = re.sub(r'__align__\s*\([^)]*\)|alignas\s*\([^)]*\)', lambda m: re.sub(r'[^\n]', ' ', m.group()), declaration)
    parts = split_commas(declaration, 0, len(declaration)) if not re.search(r'<[^>]*,', declaration) else [(0, len(declaration))]
    first = re.fullmatch(r'\s*(.*?[\s>])\s*(\w+)\s*((?:\[.*\])?)\s*', declaration[slice(*parts[0])], re.DOTALL)
    if not first:
        raise Refused(at, "expected `__shared__ type name[n];`")
    kind = first.group(1).strip()
    n_lines = declaration.count('\n')
    if code[start:at].strip() == 'extern':
        if re.sub(r'\s', '', first.group(3)) != '[]' or len(parts) != 1:
            raise Refused(at, "expected `extern __shared__ type name[];`")
        return start, end, f'auto* {first.group(2)} = simt_dynamic_shared<{kind}>()' + '\n' * n_lines
    out = []
    for a, b in parts:
        one = first if a == parts[0][0] else re.fullmatch(r'\s*()(\w+)\s*((?:\[.*\])?)\s*', declaration[a:b], re.DOTALL)
        if not one:
            raise Refused(at, "expected names with dimensions between the commas")
        dimensions = ' '.join(one.group(3).split())
        out.append(f'static char simt_{one.group(2)}; auto& {one.group(2)} = simt_shared<{kind}{dimensions}>(&simt_{one.group(2)}, "{one.group(2)}")')
    return start, end, '; '.join(out) + '\n' * n_lines


def rewrite(text, path):
    code = blank_out(text)
    variable = re.search(r'__device__\s+[^(){};#\n]*[;=]', code)
    if variable:
        raise Refused(variable.start(), "a __device__ variable is not restored between two thread orders: pass a pointer to device memory")
    edits = [rewrite_launch(text, code, m.start()) for m in re.finditer(r'<<<', code)]
    edits += [rewrite_shared(text, code, m.start()) for m in re.finditer(r'\b__shared__\b', code)
              if not re.search(r'#\s*define[^\n]*$', code[:m.start()])]
    for start, end, replacement in sorted(edits, reverse=True):
        missing = text.count('\n', start, end) - replacement.count('\n')
        text = text[:start] + replacement + '\n' * missing + text[end:]
    return f'#line 1 "{path}"\n{text}'


def main():
    out = Path(sys.argv[1])
    for path in sys.argv[2:]:
        if Path(path).is_absolute() or '..' in Path(path).parts:
            sys.exit(f"dev/simt/rewrite.py: {path}: expected a path below this folder, so that OUT/{path} is another file")
        text = Path(path).read_text(encoding='utf-8')
        try:
            new = rewrite(text, path)
        except Refused as refused:
            position, reason = refused.args
            sys.exit(f"{path}:{text.count(chr(10), 0, position) + 1}: dev/simt/rewrite.py: {reason}")
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(new, encoding='utf-8')


if __name__ == '__main__':
    main()
