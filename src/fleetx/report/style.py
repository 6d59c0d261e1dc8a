"""The style of the page: light or dark like the reader's system, on any screen from the width of a phone."""

_LIGHT = ("#1f6fb2", "#d1822b", "#3f8f4f", "#b0413e", "#7a5aa8", "#6b7280")
_DARK = ("#63a8e6", "#e5a55d", "#76c288", "#e58381", "#b39ddb", "#a3abb8")


def _colours(values: tuple[str, ...]) -> str:
    return "".join(f"--c{i}:{value};" for i, value in enumerate(values))


def _series(i: int) -> str:
    of_lines = f".line.c{i}{{stroke:var(--c{i})}}.dot.c{i},.ground.c{i}{{fill:var(--c{i})}}"
    return f"{of_lines}.p{i}{{fill:url(#p{i})}}"


STYLE = f"""
:root {{ --back:#fff; --ink:#1c1f24; --dim:#5b6470; --rule:#d9dde3; --tile:#f4f6f8; {_colours(_LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back:#15181c; --ink:#e6e9ed; --dim:#a0a8b3; --rule:#333a43; --tile:#1e2329; {_colours(_DARK)} }}
}}
* {{ box-sizing:border-box }}
body {{ margin:0; background:var(--back); color:var(--ink); font:15px/1.5 system-ui,sans-serif }}
main {{ max-width:76rem; margin:0 auto; padding:1rem }}
h1 {{ font-size:1.6rem; margin:.5rem 0 0; overflow-wrap:anywhere }}
h2 {{ font-size:1.2rem; margin:2rem 0 .5rem; border-bottom:1px solid var(--rule) }}
h2.run {{ font-size:1.5rem; margin-top:3rem }}
h3 {{ font-size:1.05rem; margin:1.5rem 0 .5rem }}
p, ul, dl {{ margin:.4rem 0 }}
.none, h1+p {{ color:var(--dim) }}
.tiles {{ display:grid; grid-template-columns:repeat(auto-fill,minmax(11rem,1fr)); gap:.5rem; margin:1rem 0 }}
.tiles div {{ background:var(--tile); border-radius:.4rem; padding:.5rem .7rem }}
dt {{ color:var(--dim); font-size:.82rem }}
dd {{ margin:0; font-weight:600; overflow-wrap:anywhere }}
.plots {{ display:grid; grid-template-columns:repeat(auto-fill,minmax(min(100%,20rem),1fr)); gap:1rem }}
figure {{ margin:.5rem 0; max-width:40rem }}
figure:has(.wide) {{ max-width:none }}
figcaption {{ font-weight:600 }}
.scroll {{ overflow-x:auto; max-width:100% }}
svg {{ display:block; width:100%; height:auto }}
svg.wide {{ min-width:640px }}
svg.bars {{ max-width:30rem }}
svg.defs {{ position:absolute; width:0; height:0 }}
.legend {{ list-style:none; padding:0; display:flex; flex-wrap:wrap; gap:.2rem 1rem; font-size:.85rem }}
.legend svg {{ display:inline-block; width:26px; height:12px }}
text {{ font:11px system-ui,sans-serif; fill:var(--ink) }}
text.on {{ font-size:10px; paint-order:stroke; stroke:var(--back); stroke-width:3px }}
.grid {{ stroke:var(--rule); stroke-width:1 }}
.line {{ fill:none; stroke-width:1.8 }}
.hatch {{ stroke:var(--back); stroke-width:1.2; fill:none }}
.hatch-dot {{ fill:var(--back) }}
.piece {{ stroke:var(--back); stroke-width:.5 }}
.event {{ fill:var(--tile); stroke:var(--ink); stroke-width:1.2 }}
table {{ border-collapse:collapse; font-size:.88rem; margin:.5rem 0 }}
td, th {{ padding:.2rem .7rem .2rem 0; text-align:left; vertical-align:top }}
tr {{ border-bottom:1px solid var(--rule) }}
.compare td+td, .numbers td {{ white-space:nowrap; font-variant-numeric:tabular-nums }}
.compare th:first-child, .compare td:first-child {{ position:sticky; left:0; background:var(--back) }}
.flow {{ list-style:none; padding:0; display:flex; flex-wrap:wrap; gap:.4rem 1.4rem; font-weight:600 }}
.flow > li {{ position:relative; max-width:20rem; padding:.2rem .6rem; border:1.5px solid; border-radius:.4rem }}
.flow > li.net {{ border-style:dashed }}
.flow > li:not(:last-child)::after {{ content:"→"; position:absolute; right:-1.2rem; top:.2rem; font-weight:400 }}
.flow ul {{ padding-left:1rem; font-weight:400; font-size:.85rem; margin:0 }}
details {{ margin:.3rem 0 }}
summary {{ cursor:pointer; color:var(--dim); font-size:.85rem }}
details .scroll {{ max-height:18rem; overflow:auto }}
pre {{ overflow-x:auto; background:var(--tile); padding:.7rem; border-radius:.4rem; font-size:.8rem }}
@media (max-width:30rem) {{ main {{ padding:.6rem }} .tiles {{ grid-template-columns:1fr 1fr }} }}
""" + "".join(map(_series, range(len(_LIGHT))))
