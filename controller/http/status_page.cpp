#include "controller/http/http_views.h"

namespace kvferry::controller {

// All texts of nodes reach the page through textContent and title, so that none becomes HTML.
std::string_view status_page() {
  return R"PAGE(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvferry controller</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'">
<script>"use strict";let asked=fetch("overview",{cache:"no-store"});asked.catch(()=>0)</script>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>
:root{--ink:#1c2733;--dim:#5c6d7e;--line:#dde5ec;--paper:#f5f8fa;--card:#fff;--good:#12805c;--bad:#c0392b;
 --warn:#96610f;--bar:#2b7bbb;--rest:#c9d4de}
@media(prefers-color-scheme:dark){:root{--ink:#e4ebf1;--dim:#90a2b3;--line:#2b3844;--paper:#11181f;--card:#19232c;
 --good:#3fc796;--bad:#ef6f60;--warn:#e0b04c;--bar:#4c9fe0;--rest:#3a4a58}}
*{box-sizing:border-box}
body{margin:0;padding:24px;background:var(--paper);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:1360px;margin:auto}h1{font-size:20px;margin:0}h2{font-size:15px;margin:26px 0 8px}
header{display:flex;gap:4px 14px;align-items:baseline;flex-wrap:wrap}.dim{color:var(--dim)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:10px;margin-top:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.tokens{margin-top:10px}.parts{display:flex;height:10px;border-radius:5px;overflow:hidden;margin:8px 0;background:var(--rest)}
.parts i{display:block}.key{display:flex;flex-wrap:wrap;gap:2px 18px}
.key span::before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;background:var(--c)}
.two{display:grid;grid-template-columns:minmax(0,2fr) minmax(0,1fr);gap:0 20px}
@media(max-width:1000px){.two{grid-template-columns:minmax(0,1fr)}}
.tools{display:flex;align-items:baseline;gap:12px;flex-wrap:wrap;margin:26px 0 8px}.tools h2{margin:0}
input,button{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:3px 9px}
.table{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%}
th,td{padding:6px 11px;text-align:left;white-space:nowrap;border-top:1px solid var(--line)}
td.cut{max-width:260px;overflow:hidden;text-overflow:ellipsis}td.wrap{white-space:normal;overflow-wrap:anywhere;min-width:170px}
th{color:var(--dim);font-weight:500;border-top:0}th.sorts{cursor:pointer}th.by{color:var(--ink)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.bar{background:linear-gradient(var(--bar) 0 0) 11px calc(100% - 3px)/calc((100% - 22px)*var(--share)) 3px no-repeat,
 linear-gradient(var(--rest) 0 0) 11px calc(100% - 3px)/calc(100% - 22px) 3px no-repeat}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}#lost{display:none;color:var(--bad)}
@media(max-width:700px){body{padding:14px}.wide{display:none}th,td{padding:6px 8px}td.cut{max-width:110px}
 .cards{grid-template-columns:repeat(2,1fr)}input{width:100%}}
</style></head><body><main>
<header><h1>kvferry controller</h1><span id="where" class="dim"></span><span id="kept"></span>
<span id="lost">the controller does not answer; the data shown is old</span></header>
<div class="cards" id="cards"></div>
<div class="card tokens"><span class="dim">tokens of requests in the last minutes</span>
<div class="parts" id="parts"></div><div class="key" id="key"></div></div>
<div class="tools"><h2>Nodes</h2><input id="filter" type="search" placeholder="filter: name, host, role, state"
 aria-label="filter the nodes"><button id="all" hidden></button></div>
<div class="table"><table id="nodes"></table></div>
<h2>Recent failures</h2><div class="table"><table id="failures"></table></div>
<div class="two"><div><h2>Paths</h2><div class="table"><table id="paths"></table></div></div>
<div><h2>Hot prefixes</h2><div class="table"><table id="prefixes"></table></div></div></div>
<div id="events" hidden><h2>Engines (KV events)</h2><div class="table"><table id="engines"></table></div>
<h2>Models</h2><div class="table"><table id="spaces"></table></div></div>
</main><script>
"use strict";
const kRows=100;
const at=id=>document.getElementById(id),format=new Intl.NumberFormat("en-US"),num=n=>format.format(n);
const age=ms=>ms<1e5?Math.floor(ms/1e3)+" s":ms<6e6?Math.floor(ms/6e4)+" min":Math.floor(ms/36e5)+" h";
const pct=x=>Math.round(x*100)+"%",speed=g=>g<.005?"0":g.toFixed(g<10?2:g<100?1:0);
function size(n){let u=0;for(;n>=1000&&u<5;u++)n/=1024;return n.toFixed(!u||n>=100?0:n>=10?1:2)+" "+["B","KiB","MiB","GiB","TiB","PiB"][u]}
const short=name=>name.length<20?name:name.slice(0,8);
const roles={kv_producer:"prefill",kv_consumer:"decode",kv_both:"both"};
let before=null,last=null,sortBy=0,isUp=true,limit=kRows;

// A cell is a text, or {t: text, c: class, tip: title, share: 0 to 1 for a bar}. Only cells whose content has changed are touched.
function put(cell,value,cls){const v=typeof value==="object"?value:{t:value};
 const all=(cls+" "+(v.c||"")+(v.share===undefined?"":" bar")).trim(),key=[v.t,all,v.tip,v.share].join("\n");
 if(cell.shown===key)return;cell.shown=key;cell.textContent=v.t;cell.className=all;cell.title=v.tip||"";
 if(v.share!==undefined)cell.style.setProperty("--share",Math.min(1,v.share))}
function fit(list,count,make){while(list.length>count)list[list.length-1].remove();while(list.length<count)make()}
// heads: [name, classes of the column]. `sorts` is called with the number of a head that was clicked.
function table(id,heads,rows,none,sorts){const t=at(id);
 const head=t.tHead||t.createTHead(),body=t.tBodies[0]||t.createTBody();
 if(!head.rows.length){const r=head.insertRow();heads.forEach(([name,cls],i)=>{const h=document.createElement("th");
  h.textContent=name;h.className=cls;if(sorts){h.classList.add("sorts");h.onclick=()=>sorts(i)}r.append(h)})}
 if(sorts)[...head.rows[0].cells].forEach((h,i)=>h.classList.toggle("by",i===sortBy));
 if(!rows.length){fit(body.rows,0);const c=body.insertRow().insertCell();c.colSpan=heads.length;c.className="dim";
  c.textContent=none;body.isEmpty=true;return}
 if(body.isEmpty){fit(body.rows,0);body.isEmpty=false}
 fit(body.rows,rows.length,()=>body.insertRow());
 rows.forEach((row,i)=>{const r=body.rows[i];if(r.cells.length!==row.length)fit(r.cells,row.length,()=>r.insertCell());
  row.forEach((v,j)=>put(r.cells[j],v,heads[j][1]))})}
function rate(now,then,seconds){return then===undefined||!seconds?"-":num(Math.max(0,Math.round((now-then)/seconds)))}

function stateOf(n){
 if(n.lost_ago_ms!==null)return {t:"lost "+age(n.lost_ago_ms)+" ago",c:"bad",rank:0,tip:"silent for longer than its lease"};
 if(n.heartbeat_age_ms>1500)return {t:"silent "+age(n.heartbeat_age_ms),c:"warn",rank:1};
 if(n.drained)return {t:"drained",c:"good",rank:3};
 if(n.leaving)return {t:`draining, ${num(n.to_move)} left`,c:"warn",rank:2};
 if(n.is_stale)return {t:"report "+age(n.report_age_ms)+" old",c:"warn",rank:1};
 return {t:"ok",c:"good",rank:4}}
// r: the node, or null if the node is lost or has sent no report.
function view(n){const r=n.lost_ago_ms===null&&n.report_age_ms!==null?n:null;
 const asked=r?r.tokens-r.local_tokens:0;
 return {n,r,name:short(n.engine_id),role:roles[n.role]||"-",state:stateOf(n),
  fill:r&&r.num_slots?r.num_chunks/r.num_slots:-1,hit:asked>=1?Math.min(1,r.loaded_tokens/asked):-1,
  live:r?r.transfers:-1,failedAgo:n.failed_ago_ms===null?Infinity:n.failed_ago_ms}}
const or=(known,text)=>known?text:"-";
// Each column has a name, classes, a sort key (small first) and a cell.
const columns=[
 ["node","cut",v=>v.state.rank+v.name,v=>({t:v.name,tip:`${v.n.engine_id}\nnamespace ${v.n.namespace||"-"}\n${v.n.endpoint}\nserves ${v.n.serves||"-"}`})],
 ["role","",v=>v.role,v=>v.role],
 ["state","",v=>v.state.rank,v=>v.state],
 ["pool","n",v=>-v.fill,v=>v.fill<0?"-":{t:pct(v.fill),share:v.fill,
  tip:`${size(v.r.num_chunks*v.r.chunk_bytes)} of ${size(v.r.num_slots*v.r.chunk_bytes)}, ${num(v.r.num_pinned)} chunks pinned`}],
 ["hit rate","n",v=>-v.hit,v=>or(v.hit>=0,pct(v.hit))],
 ["GB/s in","n",v=>v.r?-v.r.in_gb_per_s:1,v=>or(v.r,v.r&&speed(v.r.in_gb_per_s))],
 ["GB/s out","n",v=>v.r?-v.r.out_gb_per_s:1,v=>or(v.r,v.r&&speed(v.r.out_gb_per_s))],
 ["transfers","n",v=>-v.live,v=>or(v.r,num(v.live))],
 ["requests","n",v=>-v.n.load,v=>v.n.lost_ago_ms===null?num(v.n.load):"-"],
 ["chunks","n wide",v=>-v.n.chunks,v=>num(v.n.chunks)],
 ["last failure","wide",v=>v.failedAgo,v=>v.n.failure===null?"-":{t:age(v.failedAgo)+" ago",tip:v.n.failure}],
 ["host","cut wide",v=>v.n.host,v=>({t:v.n.host||"-",tip:v.n.host})],
 ["release","wide",v=>v.n.version,v=>v.n.version||"-"],
 ["last message","n wide",v=>-v.n.heartbeat_age_ms,v=>v.n.lost_ago_ms===null?(v.n.heartbeat_age_ms/1e3).toFixed(1)+" s":"-"]];
function showNodes(){const words=at("filter").value.toLowerCase().split(/\s+/).filter(w=>w);
 const views=last.filter(v=>words.every(w=>
  [v.n.engine_id,v.n.host,v.role,v.state.t,v.n.namespace].join(" ").toLowerCase().includes(w)));
 const key=columns[sortBy][2],keyed=views.map(v=>[key(v),v]);
 keyed.sort(([a,x],[b,y])=>(a<b?-1:a>b?1:x.name<y.name?-1:x.name>y.name?1:0)*(isUp?1:-1));
 table("nodes",columns,keyed.slice(0,limit).map(([,v])=>columns.map(c=>c[3](v))),
  last.length?"no node matches the filter":"none registered; a vLLM server with KvFerryConnector registers itself",
  i=>{isUp=sortBy===i?!isUp:true;sortBy=i;showNodes()});
 at("all").hidden=views.length<=kRows;
 at("all").textContent=limit===kRows?`show all ${num(views.length)}`:`show ${kRows}`}
at("filter").oninput=()=>last&&showNodes();
at("all").onclick=()=>{limit=limit===kRows?Infinity:kRows;showNodes()};

function show(s){const seconds=before?(s.uptime_ms-before.uptime_ms)/1e3:0;
 const sum=(list,of)=>list.reduce((all,e)=>all+of(e),0);
 at("where").textContent=`${s.controller} · version ${s.version} · up ${age(s.uptime_ms)}`;
 const k=s.state,r=s.replica,troubles=[];
 if(k.folder&&!k.durable)troubles.push("state is not durable: "+k.why_not);
 if(r.etcd&&!r.etcd_ok)troubles.push("etcd unreachable for "+age(r.etcd_gone_ms));
 if(r.event_log&&!r.log_ok)troubles.push("event log unreachable");
 if(s.insecure)troubles.push("insecure: other hosts reach this controller without a cluster key");
 at("kept").className=troubles.length?"bad":"dim";
 at("kept").textContent="· "+(troubles.join(" · ")||(k.folder?"state in "+k.folder:"state in memory only"))+
  (r.name?` · replica ${r.name} of ${r.replicas.map(o=>o.name).join(", ")}`:"");
 last=s.nodes.map(row=>view(Object.fromEntries(s.columns.map((name,i)=>[name,row[i]]))));
 const told=last.filter(v=>v.r),of=key=>sum(told,v=>v.r[key]);
 const used=sum(told,v=>v.r.num_chunks*v.r.chunk_bytes),room=sum(told,v=>v.r.num_slots*v.r.chunk_bytes);
 const [tokens,local,loaded]=[of("tokens"),of("local_tokens"),of("loaded_tokens")];
 const live=last.filter(v=>v.n.lost_ago_ms===null),lost=last.length-live.length;
 const cards=[[num(live.length),"nodes"],[num(lost),"nodes lost",lost?"bad":""],[size(used),`of ${size(room)} in pools`],
  [tokens-local>=1?pct(Math.min(1,loaded/(tokens-local))):"-","hit rate of kvferry"],
  [num(of("transfers")),"transfers now"],[speed(Math.max(of("in_gb_per_s"),of("out_gb_per_s"))),"GB/s between nodes"],
  [num(sum(live,v=>v.n.load)),"requests"],[rate(s.lookups,before?before.lookups:undefined,seconds),"lookups a second"]];
 if(s.engines.length)cards.push(
  [rate(sum(s.engines,e=>e.counters.events),before?sum(before.engines,e=>e.counters.events):undefined,seconds),"engine events a second"],
  [num(sum(s.namespaces,n=>n.blocks)),"engine blocks"],
  [num(sum(s.engines,e=>e.counters.gaps))+" / "+num(sum(s.engines,e=>e.counters.restarts)),"gaps / restarts"]);
 fit(at("cards").children,cards.length,()=>{const d=document.createElement("div");d.className="card";
  d.append(document.createElement("b"),document.createElement("span"));at("cards").append(d)});
 cards.forEach(([value,name,cls],i)=>{const [b,text]=at("cards").children[i].children;put(b,value,cls||"");put(text,name,"dim")});
 const parts=[["engine's own cache",local,"var(--good)"],["kvferry",loaded,"var(--bar)"],
  ["computed",Math.max(0,tokens-local-loaded),"var(--rest)"]];
 for(const [id,tag] of [["parts","i"],["key","span"]]){fit(at(id).children,3,()=>at(id).append(document.createElement(tag)));
  parts.forEach(([name,n,colour],i)=>{const e=at(id).children[i];if(tag==="i"){e.style.background=colour;e.style.width=tokens?pct(n/tokens):"0"}
   else{e.style.setProperty("--c",colour);put(e,name+(tokens>=1?" "+pct(n/tokens):""),"")}})}
 showNodes();
 const names=new Map(last.map(v=>[v.n.endpoint,v.name])),named=e=>names.get(e)||e;
 table("failures",[["when",""],["node","cut"],["reason","wrap"],["other node","cut wide"]],s.failures.map(f=>
  [age(f.ago_ms)+" ago",short(f.node),f.what,f.peer?{t:named(f.peer),tip:f.peer}:"-"]),"none");
 table("paths",[["from","cut"],["to","cut"],["by",""],["path",""],["GB/s now","n"],["GB/s last","n"],["limit","n"],["moved","n"],["failed","n"]],
  s.paths.map(p=>{const peer={t:named(p.peer),tip:p.peer},node=short(p.node);
   return [p.is_push?node:peer,p.is_push?peer:node,p.is_push?"push":"pull",p.path||"-",or(!p.is_stale,speed(p.gb_per_s)),
    {t:speed(p.last_gb_per_s),tip:p.is_push?"a push also waits for the model":""},or(p.limit_gb_per_s,speed(p.limit_gb_per_s)),size(p.bytes),
    p.num_failed?{t:num(p.num_failed),c:"warn"}:"0"]}),"no transfer between nodes yet");
 const most=s.prefixes.length?s.prefixes[0].per_minute:1;
 table("prefixes",[["first chunk",""],["prompts a minute","n"],["nodes","n"]],s.prefixes.map(p=>
  [p.chunk,{t:p.per_minute.toFixed(p.per_minute<10?1:0),share:p.per_minute/most},num(p.nodes)]),"no prompt filled a whole chunk lately");
 at("events").hidden=!s.engines.length&&!s.namespaces.length;
 const rows=[];s.engines.forEach(e=>{const old=before&&before.engines.find(o=>o.instance_id===e.instance_id&&o.endpoint===e.endpoint);
  const ranks=Object.entries(e.blocks);(ranks.length?ranks:[["-",{gpu:0,cpu:0,disk:0,remote:0}]]).forEach(([rank,b])=>rows.push([
   e.instance_id,rank,e.model,e.tenant,e.endpoint,{t:e.state,c:e.state==="connected"?"good":e.state==="lost"?"bad":"warn"},
   {t:e.confirmed?"yes":"no",c:e.confirmed?"good":"warn"},num(b.gpu),num(b.cpu),num(b.disk),num(b.remote),
   rate(e.counters.events,old?old.counters.events:undefined,seconds),age(e.silent_ms)+" ago"]))});
 table("engines",[["instance",""],["rank","n"],["model",""],["tenant",""],["endpoint","wide"],["state",""],["confirmed",""],["gpu","n"],
  ["cpu","n"],["disk","n"],["remote","n"],["events a second","n"],["last message","n"]],rows,"none registered; POST /register adds one");
 table("spaces",[["model",""],["tenant",""],["salt",""],["tokens per block","n"],["blocks","n"],["hashes","n"],["found by hash only","n"],
  ["dropped","n"]],s.namespaces.map(n=>[n.model,n.tenant,n.salt||"-",num(n.block_size),num(n.blocks),num(n.hashes),
  num(n.counters.blocks_unplaced),num(n.counters.blocks_dropped)]),"none");
 before=s;if(!performance.getEntriesByName("shown").length)performance.mark("shown")}
async function turn(){
 if(!document.hidden)try{const r=await(asked||fetch("overview",{cache:"no-store"}));asked=null;if(!r.ok)throw 0;show(await r.json());at("lost").style.display="none"}
 catch{at("lost").style.display="inline"}setTimeout(turn,2000)}
turn();
</script></body></html>
)PAGE";
}

}  // namespace kvferry::controller
