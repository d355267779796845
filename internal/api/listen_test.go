package api_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gatewayd/internal/api"
	"gatewayd/internal/client"
	"gatewayd/internal/exitcode"
)

// failing makes and binds a server that must not come up.
func failing(t *testing.T, change func(*api.Options)) error {
	t.Helper()
	o, _ := options(t)
	change(&o)
	s, err := api.New(o)
	if err == nil {
		if err = s.Listen(); err == nil {
			s.Close()
		}
	}
	return err
}

func TestASocketOfADeadProcessIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	f := start(t, func(o *api.Options) { o.Listen[0] = "unix:" + path })
	if _, err := f.unix.Status(f.within()); err != nil {
		t.Error(err)
	}
	f.stop()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestASocketInUseIsACollisionAndGoesOnWorking(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	f := start(t, func(o *api.Options) { o.Listen[0] = "unix:" + path })
	err := failing(t, func(o *api.Options) { o.Listen = []string{"unix:" + path} })
	if exitcode.Of(err) != exitcode.Collision || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "change api.listen") {
		t.Errorf("error %v, code %d", err, exitcode.Of(err))
	}
	if _, err := f.unix.Status(f.within()); err != nil {
		t.Errorf("the first one: %v", err)
	}
}

func TestASocketWhoseOwnerIsBusyIsNotStale(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	for { // until its backlog is full
		c, err := net.Dial("unix", path)
		if err != nil {
			break
		}
		defer c.Close()
	}
	if removed, err := api.RemoveStale(path); removed || err != nil {
		t.Errorf("removed %v, %v", removed, err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Error(err)
	}
}

func TestAFileThatIsNoSocketIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	err := failing(t, func(o *api.Options) { o.Listen = []string{"unix:" + path} })
	if exitcode.Of(err) != exitcode.Collision {
		t.Errorf("error %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "precious" {
		t.Errorf("the file now: %q, %v", b, err)
	}
}

func TestTheSocketsDirectoryIsMadeAndRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	f := start(t, func(o *api.Options) { o.Listen[0] = "unix:" + filepath.Join(dir, "api.sock") })
	if _, err := f.unix.Status(f.within()); err != nil {
		t.Fatal(err)
	}
	f.stop()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory is left behind: %v", err)
	}
}

func TestASocketThatAnotherTookOverIsNotRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "api.sock")
	f := start(t, func(o *api.Options) { o.Listen[0] = "unix:" + path })
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	f.stop()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the other's socket: %v", err)
	}
}

func TestAnAddressInUseIsACollisionAndLeavesNothing(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	path := filepath.Join(t.TempDir(), "api.sock")
	err = failing(t, func(o *api.Options) { o.Listen = []string{"unix:" + path, "tcp:" + l.Addr().String()} })
	if exitcode.Of(err) != exitcode.Collision || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("error %v", err)
	}
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

func TestUnsafeOptionsAreRefused(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte(" \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*api.Options){
		"needs a token":    func(o *api.Options) { o.Tokens = nil },
		"has 0 bytes":      func(o *api.Options) { o.Tokens[0].File = empty },
		"no such file":     func(o *api.Options) { o.Tokens[0].File = empty + "x" },
		"want read, users": func(o *api.Options) { o.Tokens[0].Role = "root" },
		"need TLS":         func(o *api.Options) { o.Listen = []string{"tcp:0.0.0.0:0"} },
		"need TLS ":        func(o *api.Options) { o.Listen = []string{"tcp::0"} },
		"want unix:/path":  func(o *api.Options) { o.Listen = []string{"udp:1.2.3.4:5"} },
		"want unix:/path ": func(o *api.Options) { o.Listen = []string{"unix:relative"} },
		"want full":        func(o *api.Options) { o.Privacy = "some" },
		"are needed":       func(o *api.Options) { o.Tracker = nil },
	} {
		if err := failing(t, change); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(want)) {
			t.Errorf("%v: want %q", err, want)
		}
	}
}

func TestTLSServesTokensOffLoopback(t *testing.T) {
	cert, pool := certificate(t)
	f := start(t, func(o *api.Options) {
		o.Listen[1] = "tcp:0.0.0.0:0"
		o.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	})
	_, port, _ := net.SplitHostPort(strings.TrimPrefix(f.tcp, "http://"))
	c, err := client.New(client.Options{API: "https://127.0.0.1:" + port, Token: f.tokens["read"], TLS: &tls.Config{RootCAs: pool}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Status(f.within()); err != nil {
		t.Error(err)
	}
}

func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gatewayd"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestTheUnixSocketServesThoughTCPConnectionsFillUp(t *testing.T) {
	f := start(t, nil)
	addr := strings.TrimPrefix(f.tcp, "http://")
	for range 300 { // more than one listener takes
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if _, err := f.unix.Status(f.within()); err != nil {
		t.Error(err)
	}
}

func TestServeReturnsNilWhenItsContextEndsBeforeAnybodyAsked(t *testing.T) {
	o, _ := options(t)
	s, err := api.New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Serve(ctx); err != nil {
		t.Error(err)
	}
}
