# Runs the steps of tests/support/clients/python/script.py with Perl's DBI: `perl client.pl mysql|MariaDB`.
use strict;
use warnings;
use utf8;
use DBI qw(:sql_types);
use Digest::SHA qw(sha256_hex);
use Encode qw(decode_utf8);
use IO::Handle;
use JSON::PP;
use Time::HiRes qw(time);

my $DEADLINE = 20;    # the server must notice the end of a session within these seconds
my $SLEEP    = 60;    # seconds that a query takes unless it is killed

my $driver = shift;
my $prefix = lc $driver;    # the driver's attributes begin with it

sub plan { return $ENV{"MATRIX_$_[0]"} // '' }

sub opened {
    my ($password) = @_;
    my ($host, $port, $database) = map { plan($_) } qw(HOST PORT DATABASE);
    my %options = (
        RaiseError => 1,
        PrintError => 0,
        AutoCommit => 1,
        "${prefix}_local_infile"     => 1,
        "${prefix}_multi_statements" => 1,
        "${prefix}_compression"      => plan('COMPRESS') ? 1 : 0,
    );
    $options{mysql_enable_utf8mb4} = 1 if $driver eq 'mysql';
    if (plan('CA')) {
        $options{"${prefix}_ssl"} = 1;
        # Debian's DBD::mysql can make libmariadb require TLS only by verifying the certificate.
        $options{mysql_ssl_optional} = 1 if $driver eq 'mysql';
        $options{"${prefix}_ssl_ca_file"}            = plan('CA');
        $options{"${prefix}_ssl_verify_server_cert"} = 1;
    }
    my $name = "dbi:$driver:host=$host;port=$port;database=$database";
    return DBI->connect($name, plan('USER'), $password // plan('PASSWORD'), \%options);
}

sub shown { my $text = JSON::PP->new->canonical->allow_nonref->encode($_[0]); return substr $text, 0, 120 }

# Values are compared as text: Perl hardly distinguishes numbers from text.
sub texts { my ($value) = @_; return ref $value ? [map { texts($_) } @$value] : defined $value ? "$value" : undef }

sub expect {
    my ($got, $wanted, $what) = @_;
    my ($left, $right) = map { JSON::PP->new->allow_nonref->encode(texts($_)) } $got, $wanted;
    die(($what // 'got') . ': ' . shown($got) . ', not ' . shown($wanted) . "\n") if $left ne $right;
}

sub expect_error {
    my ($code, $action) = @_;
    eval { $action->(); 1 } and die "no error $code\n";
    my $error = $@;
    expect($DBI::err // 0, $code, $error);
    return "error $code";
}

# Executes a statement: with `prepared`, the server prepares it; with `stream`, the driver does not buffer its rows.
# A parameter that is a blob is passed as a reference.
sub executed {
    my ($session, $sql, $parameters, %how) = @_;
    my %attributes = (
        "${prefix}_server_prepare"                  => $how{prepared} ? 1 : 0,
        "${prefix}_server_prepare_disable_fallback" => 1,
        "${prefix}_use_result"                      => $how{stream} ? 1 : 0,
    );
    my $statement = $session->prepare($sql, \%attributes);
    my $at = 0;
    for my $value (@{ $parameters // [] }) {
        $at++;
        if   (ref $value) { $statement->bind_param($at, $$value, SQL_BLOB) }
        else              { $statement->bind_param($at, $value) }
    }
    $statement->execute;
    return $statement;
}

sub rows {
    my $statement = executed(@_);
    return $statement->{NUM_OF_FIELDS} ? $statement->fetchall_arrayref : [];
}

sub user { my ($session) = @_; return (split /@/, rows($session, 'select current_user()')->[0][0])[0] }

# Waits for the lock and takes it. If `got` is 0, checks that another session has it.
sub get_lock {
    my ($session, $name, $got) = @_;
    $got //= 1;
    expect(rows($session, "select get_lock('$name', " . $DEADLINE * $got . ')'), [[$got]], $name);
}

sub queries {
    my ($table, %how) = @_;
    my $session = opened();
    my $run = sub { rows($session, $_[0], $_[1], %how) };
    my @rows = map { [$_, "Zeile $_ 🌊", 2**32 + $_, $_ / 4, $_ % 2 ? undef : 'x' x ($_ * 20)] } 0 .. 19;
    my $columns = "select id, name, big, ratio, note from $table";
    $run->("drop table if exists $table");
    $run->("create table $table (id int primary key, name varchar(200) character set utf8mb4, "
            . 'big bigint, ratio double, note text)');
    $run->("insert into $table values (?, ?, ?, ?, ?)", $_) for @rows;
    expect($run->("$columns order by id"), \@rows);
    expect($run->("$columns where id = ?", [$_->[0]]), [$_]) for @rows[0 .. 2];
    expect($run->("$columns where id = ?", [-1]), []);
    $run->("update $table set name = ? where id >= ?", ['neu', 10]);
    $run->("delete from $table where id = ?", [19]);
    expect($run->("select count(*) from $table where name = ?", ['neu']), [[9]]);
    my $long = plan('LONG');
    expect($run->("select repeat('y', $long)"), [['y' x $long]]);
    my $absent = expect_error(1146, sub { $run->('select * from absent') });
    my $again = expect_error(1062, sub { $run->("insert into $table values (?, 'x', 1, 1, null)", [1]) });
    $run->("drop table $table");
    return "20 rows, $absent, $again";
}

sub summed {
    my ($rows, %how) = @_;
    my $session   = opened();
    # Neither driver streams prepared statements. DBD::MariaDB 1.22 fetches no row of a streamed result.
    my $stream    = $driver eq 'mysql' && !$how{prepared};
    my $statement = executed($session, "select n from numbers where n <= $rows", [], %how, stream => $stream);
    my ($count, $sum) = (0, 0);
    while (my $row = $statement->fetchrow_arrayref) {
        $count++;
        $sum += $row->[0];
    }
    expect([$count, $sum], [$rows, $rows * ($rows + 1) / 2]);
    return "$count rows";
}

sub blob {
    my (%how) = @_;
    my $session = opened();
    open my $random, '<:raw', '/dev/urandom' or die $!;
    read $random, my $blob, plan('BLOB');
    my $digest = sha256_hex($blob);
    rows($session, 'drop table if exists blobs');
    rows($session, 'create table blobs (id int primary key, data longblob)');
    rows($session, 'insert into blobs values (?, ?)', [1, \$blob], %how);
    my ($found) = @{ rows($session, 'select data, sha2(data, 256) from blobs where id = ?', [1], %how) };
    expect($found->[1], $digest, 'digest by the server');
    expect(sha256_hex($found->[0]), $digest, 'digest of what came back');
    rows($session, 'drop table blobs');
    return length($blob) . ' bytes';
}

sub multi {
    my ($session, $sql) = @_;
    my $statement = executed($session, $sql);
    my @found;
    do { push @found, $statement->fetchall_arrayref if $statement->{NUM_OF_FIELDS} } while ($statement->more_results);
    return \@found;
}

# Runs `$body` in a child process; its argument is a function that sends a line to the parent process. Runs `$parent`
# with the stream of these lines. Then kills the child and returns the result of `$parent`.
sub with_child_process {
    my ($body, $parent) = @_;
    pipe my $reader, my $out or die $!;
    my $child = fork // die $!;
    if ($child == 0) {
        $out->autoflush(1);
        eval { $body->(sub { print $out "$_[0]\n" }); 1 } or print $out "failed: $@\n";
        kill KILL => $$;    # a normal exit would close the parent's connections, too
    }
    close $out;
    my @result = eval { $parent->($reader) };
    my $error = $@;
    kill KILL => $child;    # its socket is closed without COM_QUIT
    waitpid $child, 0;
    die $error if $error;
    return @result;
}

sub next_line { my ($reader) = @_; my $line = readline($reader) // die "the child sent nothing\n"; chomp $line; return $line }

my %steps = (
    login => sub {
        my $session = opened();
        return user($session) . ' in ' . rows($session, 'select database()')->[0][0];
    },
    wrong_password => sub { expect_error(1045, sub { opened('not the password') }) },
    ping           => sub {
        my $session = opened();
        $session->ping or die "no answer\n";
        expect(rows($session, 'select 1'), [[1]]);
        $session->ping or die "no answer\n";
        return '';
    },
    query_text     => sub { queries('query_text') },
    query_prepared => sub { queries('query_prepared', prepared => 1) },
    transactions   => sub {
        my ($session, $second) = (opened(), opened());
        rows($session, 'drop table if exists tx');
        rows($session, 'create table tx (id int primary key) engine=innodb');
        my $number = 0;
        for my $end (qw(commit rollback)) {
            $session->begin_work;
            rows($session, 'insert into tx values (?)', [$number]);
            expect(rows($session, 'select count(*) from tx'), [[$number + 1]]);
            expect(rows($second,  'select count(*) from tx'), [[$number]]);
            $session->$end;
            expect(rows($second, 'select count(*) from tx'), [[1]]);
            $number++;
        }
        rows($session, 'drop table tx');
        return '0 1 1';
    },
    rows_text     => sub { summed(plan('ROWS')) },
    rows_prepared => sub { summed(plan('ROWS_PREPARED'), prepared => 1) },
    blob_text     => sub { blob() },
    blob_prepared => sub { blob(prepared => 1) },
    multi         => sub {
        my $session = opened();
        my $found = multi($session, 'select 1; drop table if exists multi; create table multi (id int); '
                . 'insert into multi values (1), (2); select count(*) from multi; drop table multi');
        expect($found, [[[1]], [[2]]]);
        my $outcome = expect_error(1146, sub { multi($session, 'select 1; select * from absent; select 2') });
        expect(rows($session, 'select 3'), [[3]]);
        return "2 results, $outcome";
    },
    load_data => sub {
        my ($session, $count) = (opened(), plan('LOAD_ROWS'));
        rows($session, 'drop table if exists loaded');
        rows($session, 'create table loaded (id int primary key, name varchar(50))');
        rows($session, 'load data local infile ? into table loaded', [plan('LOAD_FILE')]);
        my $found = rows($session, 'select count(*), sum(id) from loaded');
        expect($found, [[$count, $count * ($count - 1) / 2]]);
        rows($session, 'drop table loaded');
        return "$count rows";
    },
    kill => sub {
        my ($outcome) = with_child_process(
            sub {
                my ($say) = @_;
                my $victim = opened();
                my $number = rows($victim, 'select connection_id()')->[0][0];
                get_lock($victim, "begun $number");
                get_lock($victim, "gone $number");
                $say->($number);
                eval { rows($victim, "select release_lock('begun $number'), sleep($SLEEP)"); 1 }
                    and return $say->('the query ended without an error');
                # The client library's own error codes begin at 2000: the connection was lost.
                $say->($DBI::err >= 2000 ? 'connection lost' : "error $DBI::err");
            },
            sub {
                my ($reader) = @_;
                my $number = next_line($reader);
                my $killer = opened();
                get_lock($killer, "begun $number");
                rows($killer, "kill $number");
                my $last = next_line($reader);
                get_lock($killer, "gone $number");
                return $last;
            },
        );
        $outcome =~ /^(connection lost|error \d+)$/ or die "$outcome\n";
        return $outcome;
    },
    cut => sub {
        my ($other, $gone) = with_child_process(
            sub {
                my ($say) = @_;
                my $session = opened();
                my $number = rows($session, 'select connection_id()')->[0][0];
                get_lock($session, "gone $number");
                my $statement = executed($session, "select n, repeat('x', 100) from numbers", [], stream => 1);
                if ($driver eq 'mysql') { $statement->fetchrow_arrayref or die "no row\n" for 1 .. 1000 }
                $say->($number);
                sleep $SLEEP;
            },
            sub {
                my ($reader) = @_;
                my $gone  = 'gone ' . next_line($reader);
                my $other = opened();
                get_lock($other, $gone, 0);
                return ($other, $gone);
            },
        );
        get_lock($other, $gone);
        expect(rows(opened(), 'select 1'), [[1]]);
        return '';
    },
);
my %lacks = (
    batch       => 'no protocol of its own for batches',
    cursor      => 'no server-side cursors',
    change_user => 'no change of user',
    reset       => 'no reset of a connection',
);

STDOUT->autoflush(1);
for my $step (split / /, plan('STEPS')) {
    my $began = time;
    my ($ok, $detail) = (JSON::PP::true, '');
    if ($lacks{$step}) {
        ($ok, $detail) = (undef, $lacks{$step});
    } elsif (!eval { $detail = $steps{$step}->(); 1 }) {
        ($ok, $detail) = (JSON::PP::false, substr "$@", 0, 300);
    }
    my %outcome = (step => $step, ok => $ok, detail => $detail, seconds => 0 + sprintf('%.3f', time - $began));
    print JSON::PP->new->ascii->encode(\%outcome), "\n";
}
