package config

import "time"

// The structs below are the part of the schema that no code reads yet. They are
// here so that a file written for later is checked, and refused by name.

type rawDivert struct {
	From          []deviceName `yaml:"from" doc:"LAN interfaces whose connections are diverted."`
	To            []string     `yaml:"to" doc:"all, or sets, prefixes and fake_ip."`
	Exclude       []string     `yaml:"exclude" doc:"Destinations that stay in the kernel."`
	ExcludeSource []string     `yaml:"exclude_source" doc:"Sources that stay in the kernel."`
	DNS           bool         `yaml:"dns" doc:"Divert queries to the router's own address."`
	Host          bool         `yaml:"host" doc:"Divert the host's own traffic."`
	FailClosed    bool         `yaml:"fail_closed" doc:"Keep diverted traffic in while the gateway is down."`
}

type rawCheck struct {
	URL      string        `yaml:"url" doc:"URL that is fetched through the member."`
	Interval time.Duration `yaml:"interval" doc:"Between tests."`
	Timeout  time.Duration `yaml:"timeout" doc:"Of one test."`
	Rise     int           `yaml:"rise" doc:"Successes that make a member healthy."`
	Fall     int           `yaml:"fall" doc:"Failures that make a member unhealthy."`
	HoldDown time.Duration `yaml:"hold_down" doc:"Time that a member stays unhealthy at least."`
}

type rawSniff struct {
	TCP     []port        `yaml:"tcp" doc:"TCP ports."`
	UDP     []port        `yaml:"udp" doc:"UDP ports."`
	Timeout time.Duration `yaml:"timeout" doc:"How long the first bytes are waited for."`
	Dial    string        `yaml:"dial" enum:"address|name" doc:"What is dialled when a name was found."`
}

type rawTime struct {
	Days []string `yaml:"days" enum:"mon|tue|wed|thu|fri|sat|sun" doc:"Days on which it begins."`
	From string   `yaml:"from" doc:"Time of day, HH:MM."`
	To   string   `yaml:"to" doc:"Time of day, HH:MM; before from it is on the next day."`
	Zone string   `yaml:"zone" doc:"Time zone, as in Europe/Berlin."`
}

type rawWG struct {
	Tag            tagName            `yaml:"tag" need:"a tag for it" doc:"Name of the inbound and of the outbound toward its peers."`
	Listen         port               `yaml:"listen" doc:"UDP port; without it the device is only a way out."`
	PrivateKeyFile absPath            `yaml:"private_key_file" doc:"File that holds the private key."`
	Address        []interfaceAddress `yaml:"address" doc:"Addresses of the device with their prefix lengths."`
	MTU            choice             `yaml:"mtu" default:"auto" min:"576" max:"65535" doc:"Largest packet in bytes."`
	Accounting     string             `yaml:"accounting" enum:"payload|wire" doc:"What quotas charge."`
	PeerToPeer     bool               `yaml:"peer_to_peer" doc:"Peers may reach each other."`
	Drain          Drain              `yaml:"drain" doc:"What happens to flows when the definition changes."`
	Client         *rawWGClient       `yaml:"client" doc:"What goes into generated client configurations."`
	Peers          []rawPeer          `yaml:"peers" doc:"The peers."`
}

type rawWGClient struct {
	Endpoint  string        `yaml:"endpoint" doc:"Host and port that clients connect to."`
	Routes    []network     `yaml:"routes" doc:"Prefixes that clients send here."`
	DNS       []string      `yaml:"dns" doc:"gateway, or addresses of resolvers."`
	Keepalive time.Duration `yaml:"keepalive" doc:"Interval of clients' keepalives; 0s is none."`
}

type rawPeer struct {
	Name       string        `yaml:"name" doc:"Name of the peer."`
	User       string        `yaml:"user" doc:"User whose traffic it is; without it the peer is anonymous."`
	PublicKey  string        `yaml:"public_key" need:"its public key" doc:"Public key, base64."`
	Endpoint   string        `yaml:"endpoint" doc:"Host and port of the peer."`
	AllowedIPs []network     `yaml:"allowed_ips" doc:"Prefixes behind the peer."`
	Keepalive  time.Duration `yaml:"keepalive" doc:"Interval of keepalives; 0s is none."`
}

type rawSet struct {
	Tag           tagName       `yaml:"tag" need:"a tag for it" doc:"Name of the set."`
	File          absPath       `yaml:"file" doc:"File that lists the entries."`
	URL           string        `yaml:"url" doc:"URL of a list; the last good copy is kept."`
	Every         time.Duration `yaml:"every" doc:"Interval of refreshes."`
	Via           tagName       `yaml:"via" doc:"Outbound that it is fetched through."`
	Max           Size          `yaml:"max" doc:"Largest list."`
	Format        string        `yaml:"format" doc:"Format of the list, as in hosts."`
	Required      bool          `yaml:"required" doc:"Without it the gateway does not start."`
	Domain        []string      `yaml:"domain" doc:"Domains, exactly."`
	DomainSuffix  []string      `yaml:"domain_suffix" doc:"Domains and what is under them."`
	DomainKeyword []string      `yaml:"domain_keyword" doc:"Parts of domains."`
	DomainRegex   []string      `yaml:"domain_regex" doc:"Regular expressions for domains."`
	IP            []network     `yaml:"ip" doc:"Addresses and prefixes."`
	MMDB          absPath       `yaml:"mmdb" doc:"MaxMind database."`
	Country       []string      `yaml:"country" doc:"Countries of the database, ISO 3166."`
}

type rawDNS struct {
	Hijack           bool           `yaml:"hijack" doc:"Answer flows to port 53 of any address."`
	Listen           []string       `yaml:"listen" doc:"Own listeners, address and port."`
	ClientFrom       []network      `yaml:"client_from" doc:"Front resolvers that may name the client."`
	Servers          []rawDNSServer `yaml:"servers" doc:"Upstreams."`
	Default          *rawDNSDefault `yaml:"default" doc:"Upstreams of what no rule answers."`
	Rules            []rawDNSRule   `yaml:"rules" doc:"The first rule that matches answers."`
	Cache            *rawDNSCache   `yaml:"cache" doc:"The cache."`
	FakeIP           *rawFakeIP     `yaml:"fake_ip" doc:"Prefixes of made-up addresses."`
	Hosts            *rawHosts      `yaml:"hosts" doc:"Names of this network."`
	RebindProtection bool           `yaml:"rebind_protection" doc:"Refuse answers of private addresses for outside names."`
}

type rawDNSServer struct {
	Tag     tagName `yaml:"tag" need:"a tag for it" doc:"Name of the upstream."`
	Address string  `yaml:"address" need:"its address, as in tls://9.9.9.9" doc:"udp://, tcp://, tls://, https:// and an address, or system."`
	Via     tagName `yaml:"via" doc:"Outbound that it is reached through."`
}

type rawDNSDefault struct {
	Servers  []tagName `yaml:"servers" doc:"Tags of upstreams."`
	Strategy string    `yaml:"strategy" enum:"failover|parallel" doc:"How they are used."`
}

type rawDNSRule struct {
	Domain       []string  `yaml:"domain" doc:"Domains, exactly."`
	DomainSuffix []string  `yaml:"domain_suffix" doc:"Domains and what is under them."`
	Set          []string  `yaml:"set" doc:"Sets that the domain is in."`
	Client       []string  `yaml:"client" doc:"Who asks."`
	User         []string  `yaml:"user" doc:"Whose device asks."`
	Inbound      []tagName `yaml:"inbound" doc:"Where the query came in."`
	Type         []string  `yaml:"type" doc:"Types of records."`
	Servers      []tagName `yaml:"servers" doc:"Upstreams that answer."`
	Answer       []string  `yaml:"answer" doc:"nodata, nxdomain, refused, fake_ip or addresses."`
	NFTSet       string    `yaml:"nftset" doc:"nftables set that gets the addresses: family, table, set."`
}

type rawDNSCache struct {
	Size  Size          `yaml:"size" doc:"Largest size."`
	Stale time.Duration `yaml:"stale" doc:"How long an answer may be served after its end."`
}

type rawFakeIP struct {
	V4 network `yaml:"v4" doc:"IPv4 prefix."`
	V6 network `yaml:"v6" doc:"IPv6 prefix."`
}

type rawHosts struct {
	Files  []absPath `yaml:"files" doc:"Files like /etc/hosts."`
	Leases []absPath `yaml:"leases" doc:"Lease files of the DHCP server."`
}
