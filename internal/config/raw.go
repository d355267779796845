package config

import (
	"time"

	"gatewayd/flow"
)

// rawFile is the whole schema. What its tags mean is told at field.
type rawFile struct {
	Version   version       `yaml:"version" need:"version: 1" doc:"Version of this format: 1."`
	Include   []string      `yaml:"include" doc:"Further files, as patterns relative to this file. Their lists are appended in order of names; a scalar may be set in one file only, apart from version."`
	Log       rawLog        `yaml:"log" doc:"The log on standard error."`
	StateDir  absPath       `yaml:"state_dir" default:"/var/lib/gatewayd" doc:"Directory of what has to survive a restart."`
	Profile   string        `yaml:"profile" enum:"auto|tiny|large" default:"auto" doc:"Size of buffers and caps; auto chooses by memory."`
	Privacy   string        `yaml:"privacy" enum:"full|addresses|none" default:"full" doc:"What of domains and users the closed flows, the flow log and API roles below admin show."`
	Limits    rawLimits     `yaml:"limits" doc:"Limits of live things; 0 is unlimited."`
	Timeouts  rawTimeouts   `yaml:"timeouts" doc:"Times after which something is given up."`
	Sample    time.Duration `yaml:"sample" default:"1s" doc:"Interval of the traffic sampler, at least 1ms."`
	Sweep     time.Duration `yaml:"sweep" default:"1s" doc:"Interval in which users' limits are enforced apart from transfers, at least 1ms."`
	API       rawAPI        `yaml:"api" doc:"The HTTP API."`
	TUN       []rawTUN      `yaml:"tun" doc:"TUN devices that packets come from."`
	WireGuard []rawWG       `yaml:"wireguard" soon:"true" doc:"WireGuard devices: peers come in, or a way out."`
	Outbounds []rawOutbound `yaml:"outbounds" doc:"Ways out. Built in are direct, which may be redefined, reject, drop and dns."`
	Sets      []rawSet      `yaml:"sets" soon:"true" doc:"Named sets of domains and addresses."`
	Route     rawRoute      `yaml:"route" doc:"Which way out a flow takes."`
	DNS       rawDNS        `yaml:"dns" soon:"true" doc:"The DNS service."`
	Groups    []rawGroup    `yaml:"groups" doc:"Limits that each member of a group has."`
	Users     []rawUser     `yaml:"users" doc:"Users that are fixed in the file; others are made at run time."`
	Ledger    rawLedger     `yaml:"ledger" doc:"What is kept of usage."`
	Metrics   rawMetrics    `yaml:"metrics" doc:"Prometheus metrics."`
	Events    rawEvents     `yaml:"events" doc:"Where events go apart from the API."`
}

type rawLog struct {
	Level  string `yaml:"level" enum:"debug|info|warn|error" default:"info" doc:"The least severe lines that are written."`
	Format string `yaml:"format" enum:"text|json" default:"text" doc:"Form of the lines."`
}

type rawLimits struct {
	Flows     choice          `yaml:"flows" default:"auto" doc:"Live flows in all; auto chooses by memory."`
	PerSource rawSourceLimits `yaml:"per_source" doc:"Limits of each source address."`
}

type rawSourceLimits struct {
	Flows        int `yaml:"flows" default:"2048" doc:"Live flows."`
	Dials        int `yaml:"dials" default:"256" doc:"Dials in progress."`
	Associations int `yaml:"associations" default:"512" doc:"UDP associations."`
}

type rawTimeouts struct {
	Dial  time.Duration `yaml:"dial" default:"10s" doc:"For a dial to succeed."`
	Grace time.Duration `yaml:"grace" default:"5s" doc:"The longest wait at shutdown for flows, which end at once, to be closed."`
	TCP   rawTCPTimes   `yaml:"tcp" doc:"Of TCP flows."`
	UDP   rawUDPTimes   `yaml:"udp" doc:"Of UDP sub-links."`
}

type rawTCPTimes struct {
	Keepalive  rawKeepalive  `yaml:"keepalive" doc:"Probes of idle connections, on outbound legs and toward TUN clients."`
	HalfClosed time.Duration `yaml:"half_closed" default:"5m" doc:"For a half-closed flow without traffic."`
	PeerIdle   time.Duration `yaml:"peer_idle" default:"124m" doc:"For an idle flow of a WireGuard peer."`
}

type rawKeepalive struct {
	Idle     time.Duration `yaml:"idle" default:"2m" doc:"Silence before the first probe, in whole seconds; 0s turns keepalive off."`
	Interval time.Duration `yaml:"interval" default:"20s" doc:"Between probes, in whole seconds."`
	Probes   int           `yaml:"probes" default:"4" min:"1" max:"127" doc:"Unanswered probes that end the connection."`
}

type rawUDPTimes struct {
	OneWay   time.Duration          `yaml:"one_way" default:"60s" doc:"For a sub-link that was never answered."`
	Answered time.Duration          `yaml:"answered" default:"5m" doc:"For a sub-link that was answered."`
	Ports    map[port]time.Duration `yaml:"ports" doc:"port to duration. For sub-links toward these ports, in place of the two; the longest of a sub-link's ports holds. Defaults are 53, 123, 3478: 10s and 443: 30s; others are added to them."`
}

type rawAPI struct {
	Listen      []Listener `yaml:"listen" doc:"Where it listens: unix:PATH or tcp:ADDRESS:PORT. The default is unix:/run/gatewayd/api.sock; an empty list turns the API off."`
	SocketGroup string     `yaml:"socket_group" doc:"Group whose members may use the Unix socket; without it only root may."`
	Tokens      []rawToken `yaml:"tokens" doc:"Bearer tokens for TCP listeners."`
	TLS         *rawTLS    `yaml:"tls" doc:"Certificate of TCP listeners; needed off loopback."`
	Hosts       []hostName `yaml:"hosts" doc:"Host headers that TCP listeners answer to, apart from their own address."`
}

type rawToken struct {
	Name string  `yaml:"name" need:"a name for it, for logs" doc:"What logs call it."`
	Role string  `yaml:"role" enum:"read|users|admin" need:"role: read, users or admin" doc:"What it may do."`
	File absPath `yaml:"file" need:"the path of the file that holds it" doc:"File that holds the token."`
}

type rawTLS struct {
	Cert absPath `yaml:"cert_file" need:"the path of the certificate" doc:"Certificate chain, PEM."`
	Key  absPath `yaml:"key_file" need:"the path of the private key" doc:"Private key, PEM."`
}

type rawTUN struct {
	Tag     tagName            `yaml:"tag" need:"a tag for it, as in lan" doc:"Name of the inbound."`
	Device  deviceName         `yaml:"device" need:"a name for the device, as in gw0" doc:"Name of the network device."`
	Address []interfaceAddress `yaml:"address" doc:"Addresses of the device with their prefix lengths, host bits included; without it they are chosen."`
	MTU     choice             `yaml:"mtu" default:"auto" min:"576" max:"65535" doc:"Largest packet in bytes; below 1280 only with IPv4 addresses."`
	Queues  choice             `yaml:"queues" default:"auto" min:"1" max:"256" doc:"Queues of the device."`
	Offload string             `yaml:"offload" enum:"auto|on|off" default:"auto" doc:"Checksum and segmentation offloads; on fails where the kernel has none."`
	Divert  *rawDivert         `yaml:"divert" soon:"true" doc:"Send connections from LAN interfaces into the device."`
}

type rawOutbound struct {
	Tag       tagName `yaml:"tag" need:"a tag for it" doc:"Name of the outbound; direct redefines the built-in one."`
	Type      string  `yaml:"type" enum:"direct|socks5|http|balancer" need:"type: direct" doc:"What it is. Only direct is available yet."`
	Drain     Drain   `yaml:"drain" default:"keep" doc:"What happens to flows of the version before when this definition replaces it: keep, now, or a duration that they have left."`
	Filtering string  `yaml:"filtering" enum:"endpoint-independent|address-dependent|address-and-port-dependent" default:"endpoint-independent" types:"direct|socks5" doc:"Whose UDP datagrams reach the client (RFC 4787)."`

	Interface deviceName `yaml:"interface" types:"direct" doc:"Device that it leaves by."`
	Source    []address  `yaml:"source" types:"direct" doc:"Local address that it leaves from, one of each family at most."`
	Mark      mark       `yaml:"mark" types:"direct" doc:"Firewall mark of its sockets; 0 is none of its own."`
	Family    string     `yaml:"family" enum:"auto|ipv4|ipv6" default:"auto" types:"direct" doc:"Address family that it uses."`

	Server       string        `yaml:"server" types:"socks5|http" doc:"Address and port of the proxy."`
	Username     string        `yaml:"username" types:"socks5|http" doc:"User at the proxy."`
	PasswordFile absPath       `yaml:"password_file" types:"socks5|http" doc:"File that holds the password."`
	TLS          bool          `yaml:"tls" types:"http" doc:"TLS toward the proxy."`
	Via          tagName       `yaml:"via" soon:"true" types:"direct|socks5|http" doc:"Outbound that it goes through."`
	Members      []tagName     `yaml:"members" types:"balancer" doc:"Outbounds that it chooses of."`
	Strategy     string        `yaml:"strategy" enum:"failover|latency|hash" types:"balancer" doc:"How it chooses."`
	Tolerance    time.Duration `yaml:"tolerance" types:"balancer" doc:"Difference in latency that changes nothing."`
	Sticky       string        `yaml:"sticky" enum:"source|destination" types:"balancer" doc:"What hash looks at."`
	Check        *rawCheck     `yaml:"check" types:"balancer" doc:"How members are tested."`
	Interrupt    bool          `yaml:"interrupt" types:"balancer" doc:"Reset the flows of a member that went down."`
	AllDown      string        `yaml:"all_down" enum:"refuse|try" types:"balancer" doc:"What to do when every member is down."`
}

type rawRoute struct {
	Sniff   *rawSniff `yaml:"sniff" soon:"true" doc:"Where names are read from a flow's first bytes."`
	Rules   []rawRule `yaml:"rules" doc:"The first rule that matches decides."`
	Default tagName   `yaml:"default" default:"direct" doc:"Outbound of what no rule decides."`
}

type rawRule struct {
	Name      string `yaml:"name" doc:"Name of the rule in records and logs."`
	rawMatch  `yaml:",inline"`
	Outbound  tagName `yaml:"outbound" doc:"Outbound of what matches. Without it a rule with record marks, and matching goes on."`
	Pin       bool    `yaml:"pin" doc:"A UDP association stays with its first sub-link."`
	Record    bool    `yaml:"record" doc:"Mark flows for audit."`
	AllowHost bool    `yaml:"allow_host" doc:"Flows may reach addresses of this host."`
}

type rawMatch struct {
	Inbound    []tagName      `yaml:"inbound" doc:"Tags of the devices that the flow came in by."`
	Network    []flow.Network `yaml:"network" doc:"tcp, udp or icmp."`
	Source     []network      `yaml:"source" doc:"The client's address."`
	SourcePort []PortRange    `yaml:"source_port" doc:"The client's port."`
	IP         []network      `yaml:"ip" doc:"The address that the client dialled."`
	Port       []PortRange    `yaml:"port" doc:"The port that the client dialled."`
	User       []userName     `yaml:"user" doc:"Names of users, which may be made later; an anonymous flow has none."`
	UserGroup  []userName     `yaml:"user_group" doc:"Groups that the user is a member of."`
	UserState  []string       `yaml:"user_state" enum:"anonymous|active|disabled|expired|exhausted|throttled|unused" doc:"The user's state; anonymous is no user."`
	Device     []deviceSet    `yaml:"device" doc:"The client's device: mac:ADDRESS, host:NAME, an address or a prefix."`
	Not        *rawMatch      `yaml:"not" doc:"Conditions that do not hold together."`
	Any        []rawMatch     `yaml:"any" doc:"Conditions of which one holds."`
	All        []rawMatch     `yaml:"all" doc:"Conditions that each hold."`

	SourceHost    []string `yaml:"source_host" soon:"true" doc:"The client's host name."`
	Domain        []string `yaml:"domain" soon:"true" doc:"The domain, exactly."`
	DomainSuffix  []string `yaml:"domain_suffix" soon:"true" doc:"The domain, or one that it is under."`
	DomainKeyword []string `yaml:"domain_keyword" soon:"true" doc:"A part of the domain."`
	DomainRegex   []string `yaml:"domain_regex" soon:"true" doc:"A regular expression for the domain."`
	Set           []string `yaml:"set" soon:"true" doc:"Sets that the domain or address is in."`
	Protocol      []string `yaml:"protocol" soon:"true" enum:"http|tls|quic|stun" doc:"The protocol that the first bytes show."`
	DSCP          []int    `yaml:"dscp" soon:"true" min:"0" max:"63" doc:"The first packet's DSCP."`
	Time          *rawTime `yaml:"time" soon:"true" doc:"A time of the week."`
}

type rawEvents struct {
	FlowLog  *rawFlowLog  `yaml:"flow_log" doc:"A file of closed flows, a line of JSON each; without it there is none."`
	Webhooks []rawWebhook `yaml:"webhooks" doc:"URLs that events are posted to."`
}

type rawFlowLog struct {
	File absPath `yaml:"file" need:"the path of the file" doc:"Path of the file; old ones get .1, .2 and so on behind it."`
	Size Size    `yaml:"size" default:"64MiB" doc:"Size at which it is rotated, at least 64KiB."`
	Keep int     `yaml:"keep" default:"14" min:"0" max:"1000" doc:"Old files that are kept."`
}
