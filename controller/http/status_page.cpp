#include "controller/http/http_views.h"

namespace kvferry::controller {

std::string_view status_page() {
  return R"PAGE(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvferry controller</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root{--ink:#1c2733;--dim:#66788a;--line:#dde5ec;--paper:#f5f8fa;--card:#fff;--good:#12805c;--bad:#c0392b;--warn:#b7791f;--bar:#2b7bbb}
@media(prefers-color-scheme:dark){:root{--ink:#e4ebf1;--dim:#90a2b3;--line:#2b3844;--paper:#11181f;--card:#19232c;--good:#3fc796;--bad:#ef6f60;--warn:#e0b04c;--bar:#4c9fe0}}
*{box-sizing:border-box}body{margin:0;padding:28px;background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:1280px;margin:auto}h1{font-size:20px;margin:0}h2{font-size:15px;margin:28px 0 8px}
header{display:flex;gap:14px;align-items:baseline;flex-wrap:wrap}.dim{color:var(--dim)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:18px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.card b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%}th,td{padding:7px 12px;text-align:left;white-space:nowrap;border-top:1px solid var(--line)}
th{color:var(--dim);font-weight:500;border-top:0}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}#lost{display:none;color:var(--bad)}
</style></head><body><main>
<header><h1>kvferry controller</h1><span id="where" class="dim"></span><span id="kept"></span><span id="lost">the controller does not answer; the data shown is old</span></header>
<div class="cards" id="cards"></div>
<h2>Nodes (connector)</h2><div class="table"><table id="nodes"></table></div>
<h2>Engines (KV events)</h2><div class="table"><table id="engines"></table></div>
<h2>Models</h2><div class="table"><table id="spaces"></table></div>
</main><script>
"use strict";
const at=id=>document.getElementById(id),num=n=>Number(n).toLocaleString("en-US"),secs=ms=>(ms/1000).toFixed(1)+" s";
let before=null;
function cell(tag,value,cls){const c=document.createElement(tag);c.textContent=value;if(cls)c.className=cls;return c}
function table(id,heads,rows,none){const t=at(id);t.replaceChildren();const h=t.insertRow();
 heads.forEach(([name,n])=>h.append(cell("th",name,n?"n":"")));
 if(!rows.length){const r=t.insertRow();const c=cell("td",none,"dim");c.colSpan=heads.length;r.append(c)}
 rows.forEach(row=>{const r=t.insertRow();row.forEach((v,i)=>{const [text,cls]=Array.isArray(v)?v:[v,""];
  r.append(cell("td",text,((heads[i][1]?"n ":"")+cls).trim()))})})}
function rate(now,then,seconds){return then===undefined||!seconds?"-":num(Math.max(0,Math.round((now-then)/seconds)))+"/s"}
function show(s){const seconds=before?(s.uptime_ms-before.uptime_ms)/1000:0,was=before?before.counters:{};
 const sum=(list,name)=>list.reduce((all,e)=>all+e.counters[name],0),c=s.counters;
 at("where").textContent=`${s.controller} · version ${s.version} · up ${secs(s.uptime_ms)}`;
 const k=s.state,r=s.replica,troubles=[];
 if(k.folder&&!k.durable)troubles.push("state is not durable: "+k.why_not);
 if(r.etcd&&!r.etcd_ok)troubles.push("etcd unreachable for "+secs(r.etcd_gone_ms));
 if(r.event_log&&!r.log_ok)troubles.push("event log unreachable");
 at("kept").className=troubles.length?"bad":"dim";
 at("kept").textContent="· "+(troubles.join(" · ")||(k.folder?"state in "+k.folder:"state in memory only"))+
  (r.name?` · replica ${r.name} of ${r.replicas.map(o=>o.name).join(", ")}`:"");
 const cards=[["nodes",num(s.nodes.length)],["engines",num(s.engines.length)],
  ["lookups",rate(c.lookups,was.lookups,seconds)],["chunks published",rate(c.chunks_published,was.chunks_published,seconds)],
  ["engine events",rate(sum(s.engines,"events"),before?sum(before.engines,"events"):undefined,seconds)],
  ["engine blocks",num(s.namespaces.reduce((all,n)=>all+n.blocks,0))],
  ["gaps / restarts",num(sum(s.engines,"gaps"))+" / "+num(sum(s.engines,"restarts"))]];
 at("cards").replaceChildren(...cards.map(([name,value])=>{const d=document.createElement("div");d.className="card";
  d.append(cell("b",value),cell("span",name,"dim"));return d}));
 table("nodes",[["namespace"],["node"],["role"],["version"],["endpoint"],["serves"],["load",1],["state"],["chunks",1],["tails",1],["last message",1]],s.nodes.map(n=>
  [n.namespace||"-",n.engine_id,n.role||"-",n.version||"-",n.endpoint,n.serves||"-",num(n.load),
   n.drained?["drained","good"]:n.leaving?[`draining, ${num(n.to_move)} left`,"warn"]:"-",num(n.chunks),num(n.tails),
   [secs(n.heartbeat_age_ms)+" ago",n.heartbeat_age_ms>2000?"warn":""]]),"none registered");
 const rows=[];s.engines.forEach(e=>{const old=before&&before.engines.find(o=>o.instance_id===e.instance_id&&o.endpoint===e.endpoint);
  const ranks=Object.entries(e.blocks);(ranks.length?ranks:[["-",{gpu:0,cpu:0,disk:0,remote:0}]]).forEach(([rank,b])=>rows.push([
   e.instance_id,rank,e.model,e.tenant,e.endpoint,[e.state,e.state==="connected"?"good":e.state==="lost"?"bad":"warn"],
   [e.confirmed?"yes":"no",e.confirmed?"good":"warn"],num(b.gpu),num(b.cpu),num(b.disk),num(b.remote),
   rate(e.counters.events,old?old.counters.events:undefined,seconds),secs(e.silent_ms)+" ago"]))});
 table("engines",[["instance"],["rank",1],["model"],["tenant"],["endpoint"],["state"],["confirmed"],["gpu",1],["cpu",1],["disk",1],["remote",1],["events",1],["last message",1]],
  rows,"none registered; POST /register adds one");
 table("spaces",[["model"],["tenant"],["salt"],["tokens per block",1],["blocks",1],["hashes",1],["found by hash only",1],["dropped",1]],s.namespaces.map(n=>
  [n.model,n.tenant,n.salt||"-",num(n.block_size),num(n.blocks),num(n.hashes),num(n.counters.blocks_unplaced),num(n.counters.blocks_dropped)]),"none");
 before=s}
async function turn(){try{const r=await fetch("status",{cache:"no-store"});if(!r.ok)throw 0;show(await r.json());at("lost").style.display="none"}
 catch{at("lost").style.display="inline"}setTimeout(turn,2000)}
turn();
</script></body></html>
)PAGE";
}

}  // namespace kvferry::controller
